"""Reads the reward of a run from its metrics, for one line of text and a drawing with characters."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 60, 5  # characters
EIGHTHS = " ▁▂▃▄▅▆▇█"
MEAN = "reward_mean"
METRICS = "metrics.jsonl"
# Full files. The oldest has the highest number.
OLDER = "metrics.[0-9].jsonl"
# Bytes of a file that are searched for its first or last step: hundreds of lines.
END_BYTES = 1 << 20


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file of JSON lines; none if it does not exist."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def first_and_last(run_dir: Path) -> str | None:
    """The mean reward of the first step and of the last, that of the last by environment too; None without a step."""
    files = [run_dir / METRICS, *sorted(run_dir.glob(OLDER))]
    first = next(_rewarded(_end_of(files[-1], last=False)), None)
    last = next(_rewarded(line for path in files[:2] for line in reversed(_end_of(path, last=True))), first)
    if first is None or last is None:
        return None
    text = f"{first[MEAN]:.2f} in step {first['step']:,}"
    if last["step"] != first["step"]:
        text += f", {last[MEAN]:.2f} in step {last['step']:,}"
    parts = ", ".join(f"{name} {reward:.2f}" for name, reward in by_environment(last).items())
    return f"{text} ({parts})" if parts else text


def _end_of(path: Path, *, last: bool) -> list[bytes]:
    """The lines at the beginning of a file, or at its end. The one that is cut may be no JSON."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - END_BYTES) if last else 0)
            return file.read(END_BYTES).splitlines()
    except FileNotFoundError:
        return []


def _rewarded(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """A step whose line was lost has no reward."""
    for line in lines:
        with contextlib.suppress(ValueError):
            values: Any = json.loads(line)
            if isinstance(values, dict) and MEAN in values:
                yield values


def drawn(rewards: Sequence[float], steps: int) -> list[str]:
    """A bar chart from 0 to 1, as wide as `steps` will be; top line first."""
    heights = [_height(rewards, column, steps) for column in range(WIDTH)]
    lines: list[str] = []
    for row in reversed(range(HEIGHT)):
        label = {HEIGHT - 1: "1.0", 0: "0.0"}.get(row, "")
        bars = "".join(EIGHTHS[min(8, max(0, height - 8 * row))] for height in heights)
        lines.append(f"{label:>3} │{bars}".rstrip())
    first, last = " step 0 ", f" step {steps - 1}"
    return [*lines, f"    └{first}{'─' * (WIDTH - len(first) - len(last))}{last}"]


def _height(rewards: Sequence[float], column: int, steps: int) -> int:
    """Eighths of a character, of the mean over the column's steps; 0 if they are yet to come."""
    first = column * steps // WIDTH
    values = rewards[first : max(first + 1, (column + 1) * steps // WIDTH)]
    if not values:
        return 0
    mean = sum(values) / len(values)
    return max(1, round(8 * HEIGHT * min(1.0, max(0.0, mean))))


def by_environment(line: Mapping[str, Any]) -> dict[str, float]:
    prefix = f"{MEAN}/"
    return {key.removeprefix(prefix): value for key, value in line.items() if key.startswith(prefix)}

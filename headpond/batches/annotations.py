"""Arrays that a trainer adds to a step afterwards, token by token: its own logprobs, above all.

trainer/annotations/step_000042.rank_00.safetensors    the arrays of the newest steps
trainer/annotations.rank_00.jsonl                       a line of means per step; a step's last line counts
"""

import heapq
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headpond.batches.manifest import Array
from headpond.batches.signals import FOLDER
from headpond.errors import BatchError
from headpond.store import atomic, tensors

# Number of steps whose arrays are kept: those that were written last. 4 bytes a token and name.
STEPS_KEPT = 16
LINES_BYTES = 16 << 20  # Size at which the file of means begins anew. A line has about 150 bytes.
LINES_MOST = 50_000  # Lines that a reader of means has in memory: 600 bytes each.
NAMES_MOST = 8
NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
DIRECTORY = "annotations"


def write_annotations(
    run_dir: Path, step: int, data_rank: int, arrays: Mapping[str, Array], *, logprobs: Array, loss_mask: Array
) -> None:
    """Write a trainer's arrays, with one f32 entry per token of the rank's file. `logprobs` and
    `loss_mask` are the batch's own."""
    for name, array in arrays.items():
        if not NAME.fullmatch(name) or array.shape != loss_mask.shape:
            raise BatchError(
                f"annotate({name}=...): expected a name of small letters and one value for each of the "
                f"{loss_mask.size} tokens of step {step}, not {array.shape}"
            )
    directory = run_dir / FOLDER / DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    content = tensors.to_bytes(arrays, {"step": str(step), "data_rank": str(data_rank)})
    written = directory / f"step_{step:06d}.rank_{data_rank:02d}.safetensors"
    atomic.write(written, content)
    # Sorted by time, not by step: a trainer that resumes from an older checkpoint writes earlier
    # steps again.
    other_files = [path for path in directory.glob(f"step_*.rank_{data_rank:02d}.safetensors") if path != written]
    other_files.sort(key=lambda path: (path.stat().st_mtime_ns, path.name))
    for path in other_files[: 1 - STEPS_KEPT]:
        path.unlink(missing_ok=True)
    trained = loss_mask.astype(bool)
    line: dict[str, float] = {"step": step, "loss_tokens": int(trained.sum())}
    if line["loss_tokens"]:
        line |= {name: _rounded(array[trained].mean(dtype=np.float64)) for name, array in arrays.items()}
        if "logprobs" in arrays:
            line |= _mismatch(arrays["logprobs"][trained] - logprobs[trained])
    _append(run_dir / FOLDER / f"{DIRECTORY}.rank_{data_rank:02d}.jsonl", line)


def _mismatch(ratio: Array) -> dict[str, float]:
    """The estimate exp(r) - 1 - r of KL(sampler || trainer), and the largest |r|.

    r is the trainer's logprob minus the sampler's.
    """
    ratio = np.clip(ratio.astype(np.float64), -20, 20)
    return {"kl": _rounded((np.expm1(ratio) - ratio).mean()), "mismatch_max": _rounded(np.abs(ratio).max())}


def _rounded(value: Any) -> float:
    return float(f"{float(value):.6g}")


def _append(path: Path, line: Mapping[str, float]) -> None:
    full = path.exists() and path.stat().st_size > LINES_BYTES
    with path.open("wb" if full else "ab") as file:
        file.write(json.dumps(line).encode() + b"\n")


class Means:
    """step -> name -> its mean over the loss tokens of all ranks (`mismatch_max`: the maximum), read as files grow."""

    def __init__(self, run_dir: Path, *, lines_most: int = LINES_MOST) -> None:
        self._folder = run_dir / FOLDER
        self._lines_most = lines_most
        # file of a rank -> its inode, and the bytes of it that were read
        self._read: dict[str, tuple[int, int]] = {}
        # step -> file -> line, for the steps that were annotated last, the newest at the
        # end
        self._ranks: dict[int, dict[str, dict[str, float]]] = {}
        self._lines = 0
        self.by_step: dict[int, dict[str, float]] = {}

    def read(self, limit: int) -> int:
        """Read at most `limit` bytes that were appended. Return how many there were, `limit` if
        there are more."""
        done, changed = 0, set[int]()
        for path in sorted(self._folder.glob(f"{DIRECTORY}.rank_*.jsonl")):
            lines, used = self._appended(path, limit - done)
            done += used
            changed |= {self._add(path.name, line) for line in _parsed(lines)}
        for step in changed:
            self.by_step[step] = _mean([*self._ranks[step].values()])
        self._forget()
        return done

    def _appended(self, path: Path, limit: int) -> tuple[bytes, int]:
        """The whole lines that were appended, and how much of `limit` they use. A shorter file has
        begun anew."""
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            inode, read_bytes = self._read.get(path.name, (0, 0))
            begin = read_bytes if inode == stat.st_ino and read_bytes <= stat.st_size else 0
            file.seek(begin)
            content = file.read(max(0, limit))
        lines = content[: content.rfind(b"\n") + 1]
        self._read[path.name] = stat.st_ino, begin + len(lines)
        return lines, limit if len(content) == limit else len(lines)

    def _add(self, rank: str, line: dict[str, float]) -> int:
        step = int(line["step"])
        ranks = self._ranks.pop(step, {})  # a step whose lines were forgotten has only the ranks that annotate it again
        self._lines += rank not in ranks
        self._ranks[step] = ranks | {rank: line}
        return step

    def _forget(self) -> None:
        """Forget the oldest lines of ranks, but keep their means; then forget the means of the
        first steps too."""
        while self._lines > self._lines_most:
            self._lines -= len(self._ranks.pop(next(iter(self._ranks))))
        for step in heapq.nsmallest(len(self.by_step) - self._lines_most, self.by_step):
            del self.by_step[step]


def _parsed(content: bytes) -> Iterator[dict[str, float]]:
    for line in content.splitlines():
        try:
            values: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and "step" in values and "loss_tokens" in values:
            yield values


def _mean(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for rank in ranks for name in rank} - {"step", "loss_tokens"}
    means: dict[str, float] = {}
    for name in names:
        having = [(rank[name], rank["loss_tokens"]) for rank in ranks if name in rank]
        if name == "mismatch_max":
            means[name] = max(value for value, _ in having)
        elif tokens := sum(weight for _, weight in having):
            means[name] = sum(value * weight for value, weight in having) / tokens
    return means


def read_annotations(run_dir: Path, step: int, data_rank: int) -> dict[str, Array]:
    """The arrays of a rank; none if they were not written, or are older than STEPS_KEPT steps."""
    path = run_dir / FOLDER / DIRECTORY / f"step_{step:06d}.rank_{data_rank:02d}.safetensors"
    try:
        return tensors.parse(np.fromfile(path, np.uint8)).arrays
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}

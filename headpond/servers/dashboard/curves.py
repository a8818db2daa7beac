"""The curves of a run: metrics.jsonl, read as it grows, and the means that the trainer annotates."""

import math
import os
import threading
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from headpond.batches.annotations import Means

FILES = ("metrics.3.jsonl", "metrics.2.jsonl", "metrics.1.jsonl", "metrics.jsonl")
# Steps in memory, the newest ones.
STEPS_MOST = 20_000
# Limit for the keys of a run. Each takes 8 bytes a step: 40 MB at most.
KEYS_MOST = 256
# One call reads this much in 50 ms.
READ_BYTES = 8 << 20
# Points of a curve. More are averaged.
POINTS_MOST = 500
MISSING = math.nan
# Prefix of the names of annotated means.
ANNOTATED = "trainer/"


class Curves:
    """Thread-safe."""

    def __init__(self, directory: Path, *, read_bytes: int = READ_BYTES) -> None:
        self._directory = directory
        self._read_bytes = read_bytes
        self._lock = threading.Lock()
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}
        # inode of a file that is there -> bytes of it that were read
        self._read: dict[int, int] = {}
        self._means = Means(directory)

    def read(self) -> bool:
        """Read the appended lines. Return False if more is left to be read."""
        with self._lock:
            left, before, self._read = self._read_bytes - self._means.read(self._read_bytes), self._read, {}
            for name in FILES:
                left -= self._read_file(self._directory / name, left, before)
            return left > 0

    def keys(self) -> list[str]:
        with self._lock:
            last = self._means.by_step[max(self._means.by_step)] if self._means.by_step else {}
            return sorted(self._columns.keys() | {f"{ANNOTATED}{name}" for name in last})

    def last(self, count: int) -> list[dict[str, float]]:
        """The newest steps, with every key that they have, the newest first."""
        with self._lock:
            rows: list[dict[str, float]] = []
            for at in range(len(self._steps) - 1, max(-1, len(self._steps) - 1 - count), -1):
                values = {key: column[at] for key, column in self._columns.items() if not math.isnan(column[at])}
                means = self._means.by_step.get(self._steps[at], {})
                rows.append({"step": self._steps[at], **values, **{f"{ANNOTATED}{k}": v for k, v in means.items()}})
            return rows

    def series(self, keys: list[str]) -> dict[str, Any]:
        """Step numbers and, for each key, values or None; averaged where there are more than POINTS_MOST."""
        with self._lock:
            width = max(1, math.ceil(len(self._steps) / POINTS_MOST))
            starts = range(0, len(self._steps), width)
            return {
                "steps": [self._steps[min(start + width, len(self._steps)) - 1] for start in starts],
                "series": {key: [self._mean(key, start, start + width) for start in starts] for key in keys},
            }

    def _mean(self, key: str, start: int, stop: int) -> float | None:
        if key.startswith(ANNOTATED):
            name = key.removeprefix(ANNOTATED)
            values = [self._means.by_step.get(step, {}).get(name, MISSING) for step in self._steps[start:stop]]
        else:
            values = self._columns[key][start:stop] if key in self._columns else []
        known = [value for value in values if not math.isnan(value)]
        return sum(known) / len(known) if known else None

    def _read_file(self, path: Path, limit: int, before: Mapping[int, int]) -> int:
        """How much of `limit` is used: all of it, if the file goes on. A file that is renamed keeps its inode, and what
        was read of it; a new one may have the inode of one that was deleted, and is then shorter."""
        try:
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                known = before.get(stat.st_ino, 0)
                begin = known if known <= stat.st_size else 0
                file.seek(begin)
                content = file.read(max(0, limit))
        except FileNotFoundError:
            return 0
        end = content.rfind(b"\n") + 1
        for line in content[:end].splitlines():
            self._add(line)
        self._read[stat.st_ino] = begin + end
        return limit if len(content) == limit else end

    def _add(self, line: bytes) -> None:
        try:
            values: Any = orjson.loads(line)
            step = int(values.pop("step"))
        except (ValueError, TypeError, KeyError, AttributeError):
            return
        if self._steps and step <= self._steps[-1]:
            return
        for key in values.keys() - self._columns.keys():
            if len(self._columns) < KEYS_MOST:
                self._columns[key] = array("d", [MISSING]) * len(self._steps)
        self._steps.append(step)
        for key, column in self._columns.items():
            value = values.get(key)
            column.append(float(value) if isinstance(value, int | float) else MISSING)
        if len(self._steps) > 2 * STEPS_MOST:
            for column in (self._steps, *self._columns.values()):
                del column[:STEPS_MOST]

"""What a sampler is, and the built-in ones that draw in advance."""

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headpond.errors import ConfigError
from headpond.sampling.order import example_at, key

UNIFORM = "uniform"
"""Every example once in an epoch, without a sampler."""
UNKNOWN, NONE, MIXED, ALL = range(4)
ENTRIES_MOST = 1 << 18  # compressed and as text, the state is at most 90 kB
LOOKED_AT_MOST = 16  # positions for each example to draw, so that a data set that is all solved does not stop a run


@dataclass(frozen=True, kw_only=True)
class PlayedGroup:
    example: int
    rewards: tuple[float, ...]
    """Of all its finished rollouts, dropped ones too."""
    dropped: str | None = None
    """Why nothing of it is trained on; None if it is."""


class Sampler(Protocol):
    def draw(self, count: int, played: Sequence[PlayedGroup], state: Any) -> tuple[Sequence[int], Any]:
        """The next examples, at most `count`, and the next state. No examples: the data has ended."""
        ...


class Weighted:
    """Draws with replacement. `weights`: one for each example, in a list or a `.npy` or `.json` file."""

    def __init__(self, *, size: int, seed: int, weights: Sequence[float] | str) -> None:
        self._seed = seed % 2**64
        self._cumulative = np.cumsum(_checked_weights(weights, size))

    def draw(self, count: int, played: Sequence[PlayedGroup], state: Any) -> tuple[list[int], dict[str, int]]:
        drawn = state["drawn"] if state else 0
        chances = np.random.default_rng([self._seed, drawn]).random(count) * self._cumulative[-1]
        return np.searchsorted(self._cumulative, chances, side="right").tolist(), {"drawn": drawn + count}


class SolveRate:
    """Shuffled epochs that pass over most examples whose last group was solved by all rollouts or by none.

    Rewards of at least `solved` are a solution, those up to `unsolved` are not. `skip_solved` and `skip_unsolved` are
    the shares that are passed over. The last result of up to 262,144 examples is kept; with more, some share an entry.
    """

    def __init__(
        self,
        *,
        size: int,
        seed: int,
        skip_solved: float = 0.9,
        skip_unsolved: float = 0.5,
        solved: float = 1.0,
        unsolved: float = 0.0,
    ) -> None:
        if not (0 <= skip_solved <= 1 and 0 <= skip_unsolved <= 1):
            raise ConfigError("skip_solved and skip_unsolved are shares between 0 and 1")
        self._size, self._seed = size, seed
        self._skip = {UNKNOWN: 0.0, NONE: skip_unsolved, MIXED: 0.0, ALL: skip_solved}
        self._solved, self._unsolved = solved, unsolved

    def draw(self, count: int, played: Sequence[PlayedGroup], state: Any) -> tuple[list[int], dict[str, Any]]:
        entries, position = min(self._size, ENTRIES_MOST), state["position"] if state else 0
        known = _unpacked(state["known"], entries) if state else np.zeros(entries, np.uint8)
        for group in played:
            if group.rewards:
                known[group.example % entries] = self._result(group.rewards)
        drawn: list[int] = []
        looked_at = 0
        while len(drawn) < count:
            example = example_at(position, size=self._size, order="shuffled", seed=self._seed, name="solve_rate")
            chance = key(self._seed, "skip", position) / 2**64
            if looked_at >= LOOKED_AT_MOST * count or chance >= self._skip[int(known[example % entries])]:
                drawn.append(example)
            position, looked_at = position + 1, looked_at + 1
        return drawn, {"position": position, "known": base64.b64encode(zlib.compress(known.tobytes())).decode()}

    def _result(self, rewards: Sequence[float]) -> int:
        if min(rewards) >= self._solved:
            return ALL
        return NONE if max(rewards) <= self._unsolved else MIXED


SAMPLERS: dict[str, type[Any]] = {"weighted": Weighted, "solve_rate": SolveRate}


def _unpacked(text: str, entries: int) -> NDArray[np.uint8]:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8, entries).copy()


def _checked_weights(weights: Sequence[float] | str, size: int) -> NDArray[np.float64]:
    if isinstance(weights, str):
        values = _read_weights(Path(weights))
    else:
        values = np.asarray(weights, np.float64)
    if values.shape != (size,):
        raise ConfigError(f"weights has {values.size} numbers: the environment has {size} examples")
    if not (np.isfinite(values).all() and (values >= 0).all() and values.sum() > 0):
        raise ConfigError("weights must be finite, none below 0, and not all 0")
    return values


def _read_weights(path: Path) -> NDArray[np.float64]:
    try:
        content = np.load(path, allow_pickle=False) if path.suffix == ".npy" else json.loads(path.read_bytes())
        return np.asarray(content, np.float64)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"weights: {path} cannot be read as numbers: {error}") from error

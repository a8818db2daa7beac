"""The interface of a sampler, and the built-in samplers that draw in advance."""

import base64
import functools
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from headpond.data.order import example_at, key
from headpond.declarations.named_code import (
    checked_function,
    import_class,
    is_custom,
    lookup,
    named_state,
    pair,
    read_state,
)
from headpond.errors import ConfigError, StageError, error_boundary

UNIFORM = "uniform"
"""Every example once in an epoch, without a sampler."""
UNKNOWN, NONE, MIXED, ALL = range(4)
ENTRIES_MOST = 1 << 18  # The compressed state is at most 90 kB of text.
# Most positions examined for each example drawn. A data set that is all solved must not stop a run.
LOOKED_AT_MOST = 16
STATE_LIMIT_BYTES = 1 << 17  # A reply carries the state, and the ledger stores it.


@dataclass(frozen=True, kw_only=True)
class PlayedGroup:
    example: int
    rewards: tuple[float, ...]
    """Rewards of all finished rollouts, dropped ones too."""
    dropped: str | None = None
    """Why nothing of the group is trained on, or None."""


class Sampler(Protocol):
    def draw(self, count: int, played: Sequence[PlayedGroup], state: Any) -> tuple[Sequence[int], Any]:
        """Return at most `count` examples and the next state. No examples end the data."""
        ...


class Weighted:
    """Draws with replacement. `weights` has one number for each example: a list, or a `.npy` or
    `.json` file."""

    def __init__(self, *, size: int, seed: int, weights: Sequence[float] | str) -> None:
        self._seed = seed % 2**64
        self._cumulative = np.cumsum(_checked_weights(weights, size))

    def draw(self, count: int, played: Sequence[PlayedGroup], state: Any) -> tuple[list[int], dict[str, int]]:
        drawn = state["drawn"] if state else 0
        chances = np.random.default_rng([self._seed, drawn]).random(count) * self._cumulative[-1]
        return np.searchsorted(self._cumulative, chances, side="right").tolist(), {"drawn": drawn + count}


class SolveRate:
    """Shuffled epochs that skip most examples whose last group was solved by all rollouts or by
    none. Rewards of at least `solved` are a solution, those up to `unsolved` are not.
    `skip_solved` and `skip_unsolved` are the shares to skip. The last result of up to 262,144
    examples is stored; with more, some share an entry."""

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
        results = _unpacked(state["known"], entries) if state else np.zeros(entries, np.uint8)
        for group in played:
            if group.rewards:
                results[group.example % entries] = self._result(group.rewards)
        drawn: list[int] = []
        looked_at = 0
        while len(drawn) < count:
            example = example_at(position, size=self._size, order="shuffled", seed=self._seed, name="solve_rate")
            chance = key(self._seed, "skip", position) / 2**64
            if looked_at >= LOOKED_AT_MOST * count or chance >= self._skip[int(results[example % entries])]:
                drawn.append(example)
            position, looked_at = position + 1, looked_at + 1
        return drawn, {"position": position, "known": base64.b64encode(zlib.compress(results.tobytes())).decode()}

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


class Drawn(NamedTuple):
    examples: list[int]
    state: str
    """The sampler's state as JSON text. Only this module reads it."""


def load_class(name: str, *, setting: str) -> type[Any]:
    if not is_custom(name):
        return lookup(SAMPLERS, name, setting=setting)
    loaded, label = import_class(name, setting=setting, base=object), f"{setting} = {name!r}"
    if not callable(getattr(loaded, "draw", None)):
        raise ConfigError(f"{label} has no method draw(self, count, played, state)")
    checked_function(cast(Any, loaded).draw, "self", "count", "played", "state", what=f"{label}: `draw`")
    return loaded


def draw(
    name: str,
    options: Mapping[str, Any],
    *,
    environment: str,
    size: int,
    seed: int,
    count: int,
    played: Sequence[PlayedGroup],
    state: str | None,
) -> Drawn:
    """Draw at most `count` examples. `state` comes from the draw before. Raise StageError with
    the remedy."""
    setting = f"environments.{environment}.sampler"
    sampler = _made(name, json.dumps(dict(options), sort_keys=True), setting, size, seed)
    label = f"the sampler {name} of environment {environment!r}"
    with error_boundary(StageError, f"{label} failed"):
        kept = read_state(state, kind="sampler", name=name)
        examples, next_state = pair(sampler.draw(count, played, kept), "examples", label=label)
        numbers = [int(example) for example in examples]
    if len(numbers) > count:
        raise StageError(f"{label} returned {len(numbers)} examples: {count} were asked for")
    if wrong := [number for number in numbers if not 0 <= number < size]:
        raise StageError(f"{label} returned example {wrong[0]}: the environment has {size}, counted from 0")
    next_text = named_state(next_state, kind="sampler", name=name, label=label, limit=STATE_LIMIT_BYTES)
    return Drawn(numbers, next_text)


@functools.lru_cache(maxsize=32)
def _made(name: str, options: str, setting: str, size: int, seed: int) -> Sampler:
    """Make a sampler once per process: it may read a file."""
    with error_boundary(StageError, f"{setting} = {name!r} cannot be made with its sampler_options"):
        return load_class(name, setting=setting)(size=size, seed=seed, **json.loads(options))

"""Loads the sampler that a configuration names, and has it draw. Its state is kept as JSON text with its name."""

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from headpond.error_boundary import described, error_boundary
from headpond.errors import ConfigError, StageError
from headpond.registry import checked_function, import_attribute, is_custom, lookup
from headpond.sampling.samplers import SAMPLERS, PlayedGroup, Sampler

logger = logging.getLogger("headpond.sampling")

STATE_LIMIT_BYTES = 1 << 17  # it travels in a reply, and the ledger keeps it


class Drawn(NamedTuple):
    examples: list[int]
    state: str
    """JSON text. Only this module reads it."""


def load_class(name: str, *, setting: str) -> type[Any]:
    if not is_custom(name):
        return lookup(SAMPLERS, name, setting=setting)
    found, what = import_attribute(name, setting=setting), f"{setting} = {name!r}"
    if not isinstance(found, type):
        raise ConfigError(f"{what} is a {type(found).__name__}: name a class")
    if not callable(getattr(found, "draw", None)):
        raise ConfigError(f"{what} has no method draw(self, count, played, state)")
    checked_function(cast(Any, found).draw, "self", "count", "played", "state", what=f"{what}: `draw`")
    return cast("type[Any]", found)


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
    """`state` is that of the draw before. Raises StageError, with what to do."""
    setting = f"environments.{environment}.sampler"
    sampler = _made(name, json.dumps(dict(options), sort_keys=True), setting, size, seed)
    what = f"the sampler {name} of environment {environment!r}"
    with error_boundary(StageError, f"{what} failed"):
        result = cast(object, sampler.draw(count, played, _state(state, name)))
        if not isinstance(result, tuple) or len(cast("tuple[object, ...]", result)) != 2:
            raise StageError(f"{what} returned {described(result)}: it must return (examples, next state)")
        examples, after = cast("tuple[Any, Any]", result)
        numbers = [int(example) for example in examples]
    if len(numbers) > count:
        raise StageError(f"{what} returned {len(numbers)} examples: {count} were asked for")
    if wrong := [number for number in numbers if not 0 <= number < size]:
        raise StageError(f"{what} returned example {wrong[0]}: the environment has {size}, counted from 0")
    return Drawn(numbers, _kept(after, name, what))


@functools.lru_cache(maxsize=32)
def _made(name: str, options: str, setting: str, size: int, seed: int) -> Sampler:
    """One per process: it may read a file."""
    with error_boundary(StageError, f"{setting} = {name!r} cannot be made with its sampler_options"):
        return load_class(name, setting=setting)(size=size, seed=seed, **json.loads(options))


def _state(kept: str | None, name: str) -> Any:
    record: dict[str, Any] = json.loads(kept) if kept else {}
    if record and record["sampler"] != name:
        logger.warning("action=state_reset sampler=%s the state was kept by %s", name, record["sampler"])
    return record["state"] if record.get("sampler") == name else None


def _kept(state: object, name: str, what: str) -> str:
    try:
        text = json.dumps({"sampler": name, "state": state}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise StageError(f"{what} returned a state that is not JSON-serializable: {error}") from error
    if len(text) > STATE_LIMIT_BYTES:
        raise StageError(f"{what} returned a state of {len(text)} bytes: the limit is {STATE_LIMIT_BYTES}")
    return text

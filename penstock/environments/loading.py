"""The environments of a worker: made once, from its own configuration, before any job runs."""

import difflib
import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_type_hints

from pydantic import TypeAdapter, ValidationError

from penstock.config.engine import EnvironmentSettings
from penstock.environments.boundary import boundary
from penstock.environments.protocol import Closes, Environment, ScoresGroups
from penstock.errors import ConfigError, StageError
from penstock.registry import lookup

BUILT_INS = {
    "arithmetic": "penstock.environments.arithmetic:Arithmetic",
    "guess": "penstock.environments.guess:Guess",
    "distinct": "penstock.environments.distinct:Distinct",
    "program": "penstock.environments.program:Program",
}
"""what a worker plays for which nothing is configured"""
ADAPTERS = {"verifiers": "penstock.environments.verifiers:Verifiers"}


@dataclass(frozen=True, kw_only=True)
class LoadedEnvironment:
    name: str
    environment: Environment
    examples: Sequence[Any]

    @property
    def size(self) -> int:
        return len(self.examples)

    @property
    def scores_groups(self) -> bool:
        return isinstance(self.environment, ScoresGroups)

    @property
    def external_agent(self) -> bool:
        """Whether it plays through a session server."""
        return bool(getattr(self.environment, "external_agent", False))

    async def close(self) -> None:
        if isinstance(self.environment, Closes):
            with boundary(StageError, f"environment {self.name!r} could not be closed"):
                await self.environment.close()

    def example(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise StageError(f"environment {self.name!r} has no example {index}: it has {self.size}")
        with boundary(StageError, f"environment {self.name!r} could not give its example {index}"):
            return self.examples[index]


def load_environments(settings: Mapping[str, EnvironmentSettings]) -> dict[str, LoadedEnvironment]:
    """Those that are configured; the built-ins, under their own names, when none is. Imports and builds: not for a
    loop. ConfigError says all that is wrong at once."""
    wanted = settings or {name: EnvironmentSettings(use=name) for name in BUILT_INS}
    loaded, wrong = dict[str, LoadedEnvironment](), list[str]()
    for name, each in wanted.items():
        try:
            loaded[name] = load_environment(name, each)
        except ConfigError as error:
            wrong.append(f"[environments.{name}]: {error}")
    if wrong:
        raise ConfigError("\n".join(wrong))
    return loaded


def load_environment(name: str, settings: EnvironmentSettings) -> LoadedEnvironment:
    kind = _find(settings.use)
    options = _checked(kind, settings.options)
    with boundary(ConfigError, "it cannot be made"):
        environment = kind(**options)
    if not inspect.iscoroutinefunction(getattr(environment, "rollout", None)):
        raise ConfigError("it has no `async def rollout(self, example, policy)`")
    with boundary(ConfigError, "its examples cannot be read"):
        found = environment.examples
        examples = found if hasattr(found, "__len__") and hasattr(found, "__getitem__") else list(found)
    if not len(examples):
        raise ConfigError("it has no examples")
    return LoadedEnvironment(name=name, environment=environment, examples=examples)


def _find(use: str) -> type[Any]:
    module, _, name = (use if ":" in use else lookup(BUILT_INS | ADAPTERS, use, setting="use")).partition(":")
    with boundary(ConfigError, f"use = {use!r} cannot be imported"):
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError as error:
            where = "install it where the worker runs, or add its directory to PYTHONPATH"
            raise ConfigError(f"use = {use!r} cannot be imported: {error}; {where}") from error
    if not isinstance(found, type):
        raise ConfigError(f"use = {use!r}: module {module} has no class {name!r}")
    return cast("type[Any]", found)


def _checked(kind: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the class's own annotations want them."""
    parameters = inspect.signature(kind).parameters
    hints = get_type_hints(kind.__init__, include_extras=True)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    checked: dict[str, Any] = {}
    for name, value in options.items():
        if name not in parameters and not takes_any:
            nearest = difflib.get_close_matches(name, parameters, n=1, cutoff=0.0)
            raise ConfigError(f"it has no option {name!r}" + (f"; the nearest is {nearest[0]!r}" if nearest else ""))
        try:
            checked[name] = TypeAdapter(hints[name]).validate_python(value) if name in hints else value
        except ValidationError as error:
            raise ConfigError(f"options.{name}: {error.errors()[0]['msg']}") from error
    return checked

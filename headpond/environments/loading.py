"""Loads a worker's environments from its configuration once, before any job runs."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from headpond.config.engine import EnvironmentCode, EnvironmentSettings
from headpond.declarations.named_code import import_class, is_custom, lookup
from headpond.environments.protocol import Closes, Environment, ScoresGroups
from headpond.errors import ConfigError, StageError, error_boundary

BUILT_INS = {
    "arithmetic": "headpond.environments.builtin.arithmetic:Arithmetic",
    "guess": "headpond.environments.builtin.guess:Guess",
    "distinct": "headpond.environments.builtin.distinct:Distinct",
    "program": "headpond.environments.builtin.arithmetic_program:ArithmeticProgram",
}  # Loaded when no environment is configured.
ADAPTERS = {"verifiers": "headpond.environments.verifiers:Verifiers"}


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
        """Whether the environment's agent uses the policy through a session server."""
        return bool(getattr(self.environment, "external_agent", False))

    async def close(self) -> None:
        if isinstance(self.environment, Closes):
            with error_boundary(StageError, f"environment {self.name!r} could not be closed"):
                await self.environment.close()

    def example(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise StageError(f"environment {self.name!r} has no example {index}: it has {self.size}")
        with error_boundary(StageError, f"environment {self.name!r} failed to return example {index}"):
            return self.examples[index]


class WrongOption(ConfigError):
    """An option that the environment refuses; `option` is its name."""

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


# Maps the keys of a setting to the place that sets it: `RunConfig.place_of`.
PlaceOf = Callable[..., str]


def load_environments(
    settings: Mapping[str, EnvironmentCode], place_of: PlaceOf | None = None, *, section: str = "environments"
) -> dict[str, LoadedEnvironment]:
    """Load the environments of `section`, or all built-in ones if none is configured. Blocks
    during imports and construction. Raise one ConfigError that lists every problem with its
    place in the configuration."""
    selected = settings or {name: EnvironmentSettings(use=name) for name in BUILT_INS}
    loaded, problems = dict[str, LoadedEnvironment](), list[str]()
    for name, code in selected.items():
        try:
            loaded[name] = load_environment(name, code)
        except ConfigError as error:
            wrong = ("options", error.option) if isinstance(error, WrongOption) else ("use",)
            place = f"{place_of(section, name, *wrong)}: " if place_of else ""
            problems.append(f"{place}[{section}.{name}]: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return loaded


def load_environment(name: str, settings: EnvironmentCode) -> LoadedEnvironment:
    kind = _import_class(settings.use)
    options = _validated(kind, settings.options)
    with error_boundary(ConfigError, "it cannot be constructed"):
        environment = kind(**options)
    if not inspect.iscoroutinefunction(getattr(environment, "rollout", None)):
        raise ConfigError("it has no `async def rollout(self, example, policy)`")
    with error_boundary(ConfigError, "its examples cannot be read"):
        examples = environment.examples
        if not (hasattr(examples, "__len__") and hasattr(examples, "__getitem__")):
            examples = list(examples)
    if not len(examples):
        raise ConfigError("it has no examples")
    return LoadedEnvironment(name=name, environment=environment, examples=examples)


def runs_own_agent(use: str) -> bool:
    """Import the class and return whether it sets `external_agent`. Such rollouts need a session
    server."""
    return bool(getattr(_import_class(use), "external_agent", False))


def _import_class(use: str) -> type[Any]:
    name = use if is_custom(use) else lookup(BUILT_INS | ADAPTERS, use, setting="use")
    return import_class(name, setting="use", base=object)


def _validated(kind: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert and validate the options by the annotations of the class's constructor."""
    parameters = inspect.signature(kind).parameters
    hints = get_type_hints(kind.__init__, include_extras=True)
    accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    validated: dict[str, Any] = {}
    for name, value in options.items():
        if name not in parameters and not accepts_any:
            nearest = difflib.get_close_matches(name, parameters, n=1, cutoff=0.0)
            hint = f"; the nearest is {nearest[0]!r}" if nearest else ""
            raise WrongOption(f"it has no option {name!r}{hint}", name)
        try:
            validated[name] = TypeAdapter(hints[name]).validate_python(value) if name in hints else value
        except ValidationError as error:
            raise WrongOption(f"options.{name}: {error.errors()[0]['msg']}", name) from error
    return validated

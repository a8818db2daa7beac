"""Code that a configuration names: a built-in name, or `module:attribute`.

A process that runs such code imports it at start (`check_here`). Other processes, like the
orchestrator, check it in a short-lived child process (`check_in_child`): the code never runs on
their event loop.
"""

import difflib
import importlib
import inspect
import json
import logging
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any, TypeVar, cast

from headpond.errors import ConfigError, StageError, described, error_boundary

logger = logging.getLogger("headpond.declarations")

T = TypeVar("T")
Facts = dict[str, Any]
"""JSON facts from a check of the code, e.g. whether an estimator has a batch phase."""

CHECK_S = 120.0  # Importing torch from a cold network disk takes a minute.
SHOWN_CHARACTERS = 2_000  # Limit for a child's output in a message.
VARIABLES_KEPT_BACK = "HEADPOND_"  # Settings contain the passwords of Redis and the engine.


@dataclass(frozen=True, kw_only=True)
class NamedCode:
    """A setting that names code as `module:attribute`, and the check of that code."""

    setting: str
    name: str
    check: str
    """`module:function` of Headpond. Called with `name` and `setting`; returns facts, or the
    loaded code, or raises."""
    place: str = ""
    """File and line, variable or flag that sets it."""


def is_custom(name: str) -> bool:
    return ":" in name


def lookup(registry: Mapping[str, T], name: str, *, setting: str) -> T:
    """Return the built-in entry. Raise ConfigError if there is none."""
    if name in registry:
        return registry[name]
    raise ConfigError(f"{setting} = {unknown(name, registry)}")


def unknown(name: str, built_in: Iterable[str]) -> str:
    """Explain that a name is not built in."""
    names = sorted(built_in)
    return (
        f"{name!r} is not built in; {_nearest(name, names)}built in are: {', '.join(names)}; "
        "name your own as module:attribute"
    )


def import_attribute(name: str, *, setting: str) -> Any:
    """Import `module:attribute` from this process's own sys.path."""
    module_name, _, attribute = name.partition(":")
    if "/" in module_name or module_name.endswith(".py"):
        raise ConfigError(f"{setting} = {name!r}: write it as {_module_name(module_name)}:{attribute or 'attribute'}")
    if not module_name or not attribute:
        raise ConfigError(f"{setting} = {name!r}: write it as module:attribute")
    label = f"{setting} = {name!r} cannot be imported"
    with error_boundary(ConfigError, label):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if missing := _missing_submodule(module_name, error.name):
                raise ConfigError(f"{setting} = {name!r}: {missing}") from error
            advice = "install it where this process runs, or add its directory to PYTHONPATH"
            raise ConfigError(f"{label}: {error}; {advice}") from error
    value = getattr(module, attribute, None)
    if value is None:
        public = [public_name for public_name in vars(module) if not public_name.startswith("_")]
        hint = _nearest(attribute, public) or "check its spelling"
        raise ConfigError(f"{setting} = {name!r}: module {module_name} has no {attribute!r}; {hint}".rstrip())
    return value


def import_class(name: str, *, setting: str, base: type[T]) -> type[T]:
    """Import the class `module:attribute`, a complete subclass of `base`."""
    kind, label = import_attribute(name, setting=setting), f"{setting} = {name!r}"
    if not (isinstance(kind, type) and issubclass(kind, base)):
        subclass = f"subclass of {base.__module__.removesuffix('.base')}.{base.__name__}"
        raise ConfigError(f"{label} is not a {'class' if base is object else subclass}")
    if missing := ", ".join(sorted(getattr(kind, "__abstractmethods__", ()))):
        raise ConfigError(f"{label}: {kind.__name__} does not define {missing}")
    return kind


def read_state(text: str | None, *, kind: str, name: str, first: Any = None) -> Any:
    """Read the state that `named_state` wrote for the same code; `first` without one."""
    record: dict[str, Any] = json.loads(text) if text else {}
    if record and record[kind] != name:
        logger.warning("action=state_reset %s=%s the state was kept by %s", kind, name, record[kind])
    return record["state"] if record.get(kind) == name else first


def named_state(state: object, *, kind: str, name: str, label: str, limit: int) -> str:
    """Write the state that code returned, with the name of that code, as JSON."""
    try:
        text = json.dumps({kind: name, "state": state}, default=_plain, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise StageError(f"{label} returned a state that is not JSON-serializable: {error}") from error
    if len(text) > limit:
        raise StageError(f"{label} returned a state of {len(text)} bytes: the limit is {limit}")
    return text


def pair(result: object, expected: str, *, label: str) -> tuple[Any, Any]:
    """Return what code returned, if it is a pair: a result and the next state."""
    if isinstance(result, tuple) and len(cast("tuple[object, ...]", result)) == 2:
        return cast("tuple[Any, Any]", result)
    raise StageError(f"{label} returned {described(result)}: it must return ({expected}, next state)")


def _plain(value: object) -> object:
    if hasattr(value, "item"):  # a number of NumPy
        return cast(Any, value).item()
    raise TypeError(f"it contains a {type(value).__name__}")


def _module_name(path: str) -> str:
    """Return the name of the module in a file. A path from elsewhere does not show its package."""
    parts = PurePosixPath(path.removesuffix(".py")).parts
    return ".".join(parts[-1:] if {"/", ".."} & set(parts) else parts)


def _missing_submodule(module_name: str, missing: str | None) -> str | None:
    """Explain that the package exists and lacks the module. Return None if another import
    failed."""
    package, _, module = (missing or "").rpartition(".")
    places = getattr(sys.modules.get(package), "__path__", None)
    if places is None or not f"{module_name}.".startswith(f"{missing}."):
        return None
    hint = _nearest(module, [submodule.name for submodule in pkgutil.iter_modules(places)]) or "check its spelling"
    return f"{package} has no module {module!r}; {hint}".rstrip()


def checked_function(function: object, *arguments: str, what: str, advice: str = "") -> Callable[..., Any]:
    """Return `function` if it can be called with these arguments. `advice` ends the error's
    message."""
    expected = f"it must be a function of ({', '.join(arguments)}){advice}"
    if not callable(function):
        raise ConfigError(f"{what} is a {type(function).__name__}: {expected}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # A C function may lack a signature.
        return function
    try:
        signature.bind(*arguments)
    except TypeError:
        raise ConfigError(f"{what} takes {signature}: {expected}") from None
    return function


def check_here(named_codes: Sequence[NamedCode]) -> dict[str, Facts]:
    """Import the code into this process and map each setting to its facts. Raise one ConfigError
    that lists every problem."""
    return _facts([_check(named) for named in named_codes], named_codes)


def check_in_child(named_codes: Sequence[NamedCode], *, timeout_s: float = CHECK_S) -> dict[str, Facts]:
    """Check the code in a child process with the same sys.path, without our settings. See
    `check_here`."""
    if not named_codes:
        return {}
    names = ", ".join(f"{named.setting} = {named.name!r}" for named in named_codes)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(VARIABLES_KEPT_BACK)}
    program = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        "from headpond.declarations import named_code; named_code.main()"
    )
    command = [sys.executable, "-P", "-c", program, json.dumps(sys.path)]
    try:
        child = subprocess.run(
            command, input=json.dumps([asdict(named) for named in named_codes]).encode(), capture_output=True,
            env=environment, timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        advice = "move slow work out of the module's import"
        raise ConfigError(f"{names}: the import took longer than {timeout_s:.0f} s; {advice}") from None
    if child.returncode:
        shown = child.stderr.decode(errors="replace")[-SHOWN_CHARACTERS:].strip() or "it wrote nothing"
        raise ConfigError(f"{names}: the process that imports it ended with {child.returncode}: {shown}")
    return _facts(json.loads(child.stdout), named_codes)


def main() -> None:
    """Run in the child of `check_in_child`: names come on stdin, results go to stdout. The
    code's own output goes to stderr."""
    answer = os.dup(1)
    os.dup2(2, 1)
    results = [_check(NamedCode(**fields)) for fields in json.load(sys.stdin)]
    with os.fdopen(answer, "w") as output:
        json.dump(results, output)
        output.flush()
        os._exit(0)  # Threads of the imported code may never end.


def _check(named: NamedCode) -> Facts | str:
    """Return the facts, or the problem as text."""
    try:
        check = cast("Callable[..., object]", import_attribute(named.check, setting=named.setting))
        facts = check(named.name, setting=named.setting)
        return cast(Facts, facts) if isinstance(facts, dict) else {}
    except ConfigError as error:
        return str(error)


def _facts(results: Sequence[Facts | str], named_codes: Sequence[NamedCode]) -> dict[str, Facts]:
    problems = [
        (named.place, result) for named, result in zip(named_codes, results, strict=True) if isinstance(result, str)
    ]
    if problems:
        raise ConfigError("\n".join(f"{place}: {problem}" if place else problem for place, problem in problems))
    return {named.setting: cast(Facts, result) for named, result in zip(named_codes, results, strict=True)}


def _nearest(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}? " if near else ""

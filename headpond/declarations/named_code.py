"""The names that a configuration uses for code: of something built in, or `module:attribute`.

A process that runs such code imports it at start (`check_here`). A process that does not, like the orchestrator, has it
checked in a short-lived child process (`check_in_child`), so that the code never runs on its event loop.
"""

import difflib
import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any, TypeVar, cast

from headpond.errors import ConfigError, error_boundary

T = TypeVar("T")
Facts = dict[str, Any]
"""JSON: what a check finds out about the code, e.g. whether an estimator has a batch phase."""

CHECK_S = 120.0  # importing torch from a cold network disk takes a minute
SHOWN_CHARACTERS = 2_000  # of a child's output
VARIABLES_KEPT_BACK = "HEADPOND_"  # settings, among them the passwords of Redis and the engine


@dataclass(frozen=True, kw_only=True)
class NamedCode:
    """A setting that names code as `module:attribute`, and how the code is checked."""

    setting: str
    name: str
    check: str
    """`module:function` of Headpond. Called with `name` and `setting`; returns facts, or what it loaded, or raises."""
    place: str = ""
    """File and line, variable or flag that sets it."""


def is_custom(name: str) -> bool:
    return ":" in name


def lookup(registry: Mapping[str, T], name: str, *, setting: str) -> T:
    """The built-in one."""
    if name in registry:
        return registry[name]
    raise ConfigError(f"{setting} = {unknown(name, registry)}")


def unknown(name: str, built_in: Iterable[str]) -> str:
    """What is wrong with a name that is not built in."""
    known = sorted(built_in)
    return (
        f"{name!r} is not built in; {_nearest(name, known)}built in are: {', '.join(known)}; "
        "name your own as module:attribute"
    )


def import_attribute(name: str, *, setting: str) -> Any:
    """Import `module:attribute` from this process's own sys.path."""
    module_name, _, attribute = name.partition(":")
    if "/" in module_name or module_name.endswith(".py"):
        raise ConfigError(f"{setting} = {name!r}: write it as {_of_file(module_name)}:{attribute or 'attribute'}")
    if not module_name or not attribute:
        raise ConfigError(f"{setting} = {name!r}: write it as module:attribute")
    what = f"{setting} = {name!r} cannot be imported"
    with error_boundary(ConfigError, what):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if missing := _missing_submodule(module_name, error.name):
                raise ConfigError(f"{setting} = {name!r}: {missing}") from error
            advice = "install it where this process runs, or add its directory to PYTHONPATH"
            raise ConfigError(f"{what}: {error}; {advice}") from error
    found = getattr(module, attribute, None)
    if found is None:
        public = [each for each in vars(module) if not each.startswith("_")]
        hint = _nearest(attribute, public) or "check its spelling"
        raise ConfigError(f"{setting} = {name!r}: module {module_name} has no {attribute!r}; {hint}".rstrip())
    return found


def _of_file(path: str) -> str:
    """The name of the module in a file; a path from elsewhere does not tell its package."""
    parts = PurePosixPath(path.removesuffix(".py")).parts
    return ".".join(parts[-1:] if {"/", ".."} & set(parts) else parts)


def _missing_submodule(wanted: str, missing: str | None) -> str | None:
    """What is wrong, where the package exists and lacks the module; None where another import failed."""
    package, _, module = (missing or "").rpartition(".")
    places = getattr(sys.modules.get(package), "__path__", None)
    if places is None or not f"{wanted}.".startswith(f"{missing}."):
        return None
    hint = _nearest(module, [each.name for each in pkgutil.iter_modules(places)]) or "check its spelling"
    return f"{package} has no module {module!r}; {hint}".rstrip()


def checked_function(function: object, *arguments: str, what: str, advice: str = "") -> Callable[..., Any]:
    """`function`, if it can be called with these arguments. `advice` ends the message."""
    expected = f"it must be a function of ({', '.join(arguments)}){advice}"
    if not callable(function):
        raise ConfigError(f"{what} is a {type(function).__name__}: {expected}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C, without a signature
        return function
    try:
        signature.bind(*arguments)
    except TypeError:
        raise ConfigError(f"{what} takes {signature}: {expected}") from None
    return function


def check_here(wanted: Sequence[NamedCode]) -> dict[str, Facts]:
    """Setting -> facts. Imports the code into this process. Raises one ConfigError that lists every problem."""
    return _facts([_check(each) for each in wanted], wanted)


def check_in_child(wanted: Sequence[NamedCode], *, timeout_s: float = CHECK_S) -> dict[str, Facts]:
    """As `check_here`, but the code is imported by a child process with the same sys.path, without our settings."""
    if not wanted:
        return {}
    names = ", ".join(f"{each.setting} = {each.name!r}" for each in wanted)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(VARIABLES_KEPT_BACK)}
    program = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        "from headpond.declarations import named_code; named_code.main()"
    )
    command = [sys.executable, "-P", "-c", program, json.dumps(sys.path)]
    try:
        child = subprocess.run(
            command, input=json.dumps([asdict(each) for each in wanted]).encode(), capture_output=True,
            env=environment, timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        advice = "move slow work out of the module's import"
        raise ConfigError(f"{names}: the import took longer than {timeout_s:.0f} s; {advice}") from None
    if child.returncode:
        shown = child.stderr.decode(errors="replace")[-SHOWN_CHARACTERS:].strip() or "it wrote nothing"
        raise ConfigError(f"{names}: the process that imports it ended with {child.returncode}: {shown}")
    return _facts(json.loads(child.stdout), wanted)


def main() -> None:
    """The child of `check_in_child`: names on stdin, what was found on stdout. The code's own output goes to stderr."""
    answer = os.dup(1)
    os.dup2(2, 1)
    found = [_check(NamedCode(**each)) for each in json.load(sys.stdin)]
    with os.fdopen(answer, "w") as output:
        json.dump(found, output)
        output.flush()
        os._exit(0)  # threads of the imported code may not end


def _check(named: NamedCode) -> Facts | str:
    """The facts, or what is wrong."""
    try:
        check = cast("Callable[..., object]", import_attribute(named.check, setting=named.setting))
        found = check(named.name, setting=named.setting)
        return cast(Facts, found) if isinstance(found, dict) else {}
    except ConfigError as error:
        return str(error)


def _facts(found: Sequence[Facts | str], wanted: Sequence[NamedCode]) -> dict[str, Facts]:
    problems = [(named.place, each) for named, each in zip(wanted, found, strict=True) if isinstance(each, str)]
    if problems:
        raise ConfigError("\n".join(f"{place}: {problem}" if place else problem for place, problem in problems))
    return {named.setting: cast(Facts, each) for named, each in zip(wanted, found, strict=True)}


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}? " if near else ""

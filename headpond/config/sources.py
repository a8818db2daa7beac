"""Loads the configuration: TOML, then `HEADPOND_*` variables, then flags. The only reader of these variables.

Every process reads the same file. A wrong setting is reported with its file and line, variable or flag, and the
nearest setting.
"""

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headpond.config.old_names import refuse_old_values, refuse_old_variables
from headpond.config.problems import (
    Keys,
    Origins,
    Source,
    describe,
    is_toml,
    setting_keys,
    unknown_variable,
)
from headpond.config.run import RunConfig
from headpond.errors import ConfigError

PREFIX = "HEADPOND_"
CONFIG_VARIABLE = "HEADPOND_CONFIG"


def load(
    path: Path | None,
    *,
    flags: Mapping[str, Any] | None = None,
    section: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> RunConfig:
    """Read `path` (default: the file named by HEADPOND_CONFIG, if set), then the environment, then `flags`.

    `flags` maps settings (`engine.urls`) to values; None is "not given". A flag is named like its setting
    (`--engine-urls`), without the name of the command's own `section`.
    """
    refuse_old_variables(environ)
    if path is None and CONFIG_VARIABLE in environ:
        path = Path(environ[CONFIG_VARIABLE])
    text = _read(path) if path else ""
    try:
        values: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    refuse_old_values(path, values)
    origins: Origins = {}
    for name, lower_case, value in _from_environment(environ):
        keys = _spelled(values, lower_case)
        _set(values, keys, value)
        origins[keys] = f"environment, {name}"
    for key, value in (flags or {}).items():
        if value is not None:
            keys = tuple(key.split("."))
            _set(values, keys, value)
            named = keys[1:] if keys[0] == section else keys
            origins[keys] = "--" + "-".join(named).replace("_", "-")
    source = Source(path=path, text=text, origins=origins)
    problems = _wrong_types(values, origins)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        found = error.errors()
        found += [problem for problem in problems if problem["loc"] not in [each["loc"] for each in found]]
        raise ConfigError(describe(found, RunConfig, source)) from error
    if problems:
        raise ConfigError(describe(problems, RunConfig, source))
    config.read_from(source)
    return config


def _wrong_types(values: Mapping[str, Any], origins: Origins) -> list[ErrorDetails]:
    """Values of the file that only a conversion makes valid: `size = "16"`, `seeded = 1`. Variables are always text."""
    try:
        RunConfig.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        return [
            problem
            for problem in error.errors()
            if problem["type"] in ("int_type", "float_type", "bool_type")
            and isinstance(problem["input"], str | bool | int | float)
            and setting_keys(RunConfig, problem["loc"]) not in origins
        ]
    return []


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the configuration {path}: not valid UTF-8 ({error.reason})") from error


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, Keys, Any]]:
    """`HEADPOND_RECOVERY__LEASE_S=5` sets `lease_s` in `[recovery]`."""
    for name, value in environ.items():
        if name.startswith(PREFIX) and name != CONFIG_VARIABLE:
            keys = tuple(name.removeprefix(PREFIX).lower().split("__"))
            toml = is_toml(RunConfig, keys)
            if toml is None:
                raise ConfigError(unknown_variable(name, RunConfig, PREFIX, [CONFIG_VARIABLE]))
            yield name, keys, toml_value(value) if toml else value


def toml_value(text: str) -> Any:
    """A value of TOML, or else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text


def _set(values: dict[str, Any], keys: Keys, value: Any) -> None:
    table: Any = values
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            return  # the file has a value where a table belongs: validation reports that
    table[keys[-1]] = value


def _spelled(values: Mapping[str, Any], keys: Keys) -> Keys:
    """`keys` of a variable, in lower case, as the file spells them: `[environments.Sums]`."""
    spelled: list[str] = []
    table: Any = values
    for key in keys:
        known = table if isinstance(table, dict) else {}
        spelled.append(next((each for each in known if each.lower() == key), key))
        table = known.get(spelled[-1])
    return tuple(spelled)

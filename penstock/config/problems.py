"""Messages about wrong settings: file and line (or variable, or flag), what is wrong, the nearest setting."""

import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel, ValidationError

from penstock.config.sections import entry_section, is_section

Keys = tuple[str, ...]
Origins = dict[Keys, str]
"""Where settings come from that are not from the file: the name of a variable or a flag."""

RENAMED = {
    "sessions.tokenizer": 'policy.renderer ("bytes" is now "bytes-chatml")',
    "batch.logprobs_mode": "engine.logprobs_mode",
    "engine.moe_layers": "engine.hidden_layers",
}
"""Settings of release 0.1 that have another name now."""


def describe(error: ValidationError, model: type[BaseModel], path: Path | None, text: str, origins: Origins) -> str:
    """One line for each problem."""
    lines: list[str] = []
    for problem in error.errors():
        keys = tuple(str(part) for part in problem["loc"])
        lines.append(f"{_place(keys, path, text, origins)}: {_message(problem['type'], problem['msg'], keys, model)}")
    return "\n".join(lines)


def unknown_variable(name: str, model: type[BaseModel], prefix: str, others: Sequence[str]) -> str:
    setting = name.removeprefix(prefix).lower().replace("__", ".")
    if setting in RENAMED:
        return f"environment, {name}: {setting!r} has a new name: {RENAMED[setting]}"
    known = [*others, *(prefix + key.replace(".", "__").upper() for key in all_keys(model))]
    return f"environment: {name} is not a setting; the nearest is {_nearest(name, known)}"


def _place(keys: Keys, path: Path | None, text: str, origins: Origins) -> str:
    origin = next((name for set_keys, name in origins.items() if set_keys[: len(keys)] == keys), None)
    if origin is None and (number := line_of(text, keys) or line_of(text, keys[:-1])):
        return f"{path}, line {number}"
    return origin or str(path or "configuration")


def _message(kind: str, message: str, keys: Keys, model: type[BaseModel]) -> str:
    name = ".".join(keys)
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        if name in RENAMED:
            return f"{name!r} has a new name: {RENAMED[name]}"
        return f"there is no setting {name!r}; the nearest is {_nearest(name, list(all_keys(model)))!r}"
    if kind in ("model_type", "model_attributes_type", "dataclass_type"):
        return f"{name} is a table: write [{name}], and its settings below"
    return f"{name}: {message.removeprefix('Value error, ')}"


def _nearest(name: str, known: list[str]) -> str:
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]


def all_keys(section: type[Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of all settings; `environments.NAME.use` stands for any environment."""
    for name, annotation in _settings(section).items():
        if entry := entry_section(annotation):
            yield from all_keys(entry, f"{prefix}{name}.NAME.")
        elif is_section(annotation):
            yield from all_keys(annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def is_setting(section: type[Any], keys: Sequence[str]) -> bool:
    """Whether `keys` lead to a setting or a table; a table of tables may have any names."""
    settings = _settings(section)
    if keys[0] not in settings or len(keys) == 1:
        return keys[0] in settings
    annotation = settings[keys[0]]
    if entry := entry_section(annotation):
        return len(keys) > 2 and is_setting(entry, keys[2:])
    return is_section(annotation) and is_setting(annotation, keys[1:])


def _settings(section: type[Any]) -> dict[str, Any]:
    """Names and annotations."""
    if issubclass(section, BaseModel):
        return {name: field.annotation for name, field in section.model_fields.items()}
    hints = get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def line_of(text: str, keys: Sequence[str]) -> int | None:
    """The line that sets `keys`, in plain TOML: `[table]` headers and `key = value` lines."""
    table: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([^\]]+?)\s*\]+", line):
            table = [part.strip().strip("\"'") for part in header[1].split(".")]
            if table == list(keys):
                return number
        elif setting := re.match(r"\s*([\w.\"'-]+)\s*=", line):
            here = [*table, *(part.strip("\"'") for part in setting[1].split("."))]
            if here == list(keys[: len(here)]):
                return number
    return None

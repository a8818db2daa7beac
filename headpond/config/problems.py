"""Messages about wrong settings: file and line (or variable, or flag), what is wrong, the nearest setting."""

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic_core import ErrorDetails

from headpond.declarations.sections import COMMAS, Section, declarations, table_of

Keys = tuple[str, ...]
Origins = dict[Keys, str]
"""Where settings come from that are not from the file: the name of a variable or a flag."""

SHOULD_BE = "Input should be "
PLAIN = {"path_type": f"{SHOULD_BE}a path, in quotes", "tuple_type": f"{SHOULD_BE}a list"}
"""Messages of pydantic that name types of Python, in the words of TOML."""
SHOWN_CHARACTERS = 32  # of a wrong word; only settings with a list of words show it, and none of them is a secret
QUOTED = re.compile(r"'([^']*)'")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a configuration was read from. Not a part of it: two sources are equal."""

    path: Path | None = field(default=None, compare=False)
    text: str = field(default="", compare=False)
    origins: Origins = field(default_factory=Origins, compare=False)

    def place_of(self, keys: Keys) -> str:
        """File and line, variable or flag that sets `keys`."""
        origin = next((name for set_keys, name in self.origins.items() if _one_begins_the_other(set_keys, keys)), None)
        if origin is None and (number := line_of(self.text, keys)):
            return f"{self.path}, line {number}"
        return origin or str(self.path or "configuration")


def describe(problems: Iterable[ErrorDetails], model: type[Section], source: Source) -> str:
    """One line for each setting with a problem."""
    messages: dict[Keys, str] = {}
    for problem in problems:
        keys = setting_keys(model, problem["loc"])
        message = _message(problem, keys, model)
        expected = f"{'.'.join(keys)}: {SHOULD_BE}"
        if messages.setdefault(keys, message) != message and message.startswith(expected):
            messages[keys] += ", or " + message.removeprefix(expected)  # neither of two types that it may have
    return "\n".join(f"{source.place_of(keys)}: {message}" for keys, message in messages.items())


def setting_keys(model: type[Section], location: Sequence[int | str]) -> Keys:
    """The keys of the setting, or of the element of its list, from pydantic's location, which also names types."""
    keys, section, by_name = list[str](), model, False
    for part in location:
        if by_name:
            keys, by_name = [*keys, str(part)], False
        elif section is None:
            keys += [str(part)] if isinstance(part, int) else []
        else:
            keys.append(str(part))
            field = section.model_fields.get(str(part))
            table = table_of(field.annotation) if field else None
            section, by_name = (table.section, table.by_name) if table else (None, False)
    return tuple(keys)


def unknown_variable(name: str, model: type[Section], prefix: str, others: Sequence[str]) -> str:
    known = [*others, *(prefix + key.replace(".", "__").upper() for key in all_keys(model))]
    return f"environment: {name} is not a setting; the nearest is {_nearest(name, known)}"


def _message(problem: ErrorDetails, keys: Keys, model: type[Section]) -> str:
    name, kind, given = ".".join(keys), problem["type"], problem["input"]
    if kind == "extra_forbidden":
        known = all_keys(model, tables=isinstance(given, dict))
        return f"there is no setting {name!r}; the nearest is {_nearest(name, list(known))!r}"
    if kind in ("model_type", "model_attributes_type", "dict_type", "mapping_type"):
        return f"{name} is a table: write [{name}], and its settings below"
    message = PLAIN.get(kind, problem["msg"]).removeprefix("Value error, ")
    if kind in ("enum", "literal_error") and isinstance(given, str) and len(given) <= SHOWN_CHARACTERS:
        message += f", not {given!r}{_meant(given, problem.get('ctx', {}).get('expected', ''))}"
    return f"{name}: {message}".removeprefix(": ")


def _meant(given: str, expected: str) -> str:
    near = difflib.get_close_matches(given, QUOTED.findall(expected), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _nearest(name: str, known: list[str]) -> str:
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]


def all_keys(section: type[Section], *, tables: bool = False) -> Iterator[str]:
    """The dotted names of all settings, with `tables` also of tables of settings."""
    return (name for name, _ in declarations(section, tables=tables))


def is_toml(section: type[Section], keys: Sequence[str]) -> bool | None:
    """Whether the text of a variable for `keys` is TOML: tables whose keys are not Headpond's, and lists that are not
    separated by commas. None if `keys` lead to no setting; a table by name may have any names."""
    setting = section.model_fields.get(keys[0]) if keys else None
    if setting is None:
        return None
    table = table_of(setting.annotation)
    if table is not None and table.section is not None:
        if len(keys) == 1:
            return False
        return is_toml(table.section, keys[2:] if table.by_name else keys[1:])
    if table is not None or len(keys) > 1:
        return True if table is not None else None
    kinds = [get_origin(kind) for kind in (setting.annotation, *get_args(setting.annotation))]
    return tuple in kinds and COMMAS not in setting.metadata


def line_of(text: str, keys: Sequence[str]) -> int | None:
    """The line that sets `keys`: of the setting, the list's element or the table's header; else of the next outer table
    that has a line. None if there is none."""
    wanted = list(keys)
    while wanted:
        below: int | None = None
        for number, path, lines in _statements(text):
            if path == wanted:
                return number
            if path == wanted[: len(path)] and lines:
                return number + _line_in_list(lines, wanted[len(path) :])
            if path[: len(wanted)] == wanted and below is None:
                below = number
        if below:
            return below
        wanted.pop()
    return None


def _statements(text: str) -> Iterator[tuple[int, list[str], list[str]]]:
    """Line number, keys and, where it is not a table's header, the lines of each statement of a TOML file."""
    table: list[str] = []
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        lines.append(line)
        try:
            parsed = tomllib.loads("\n".join(lines))
        except tomllib.TOMLDecodeError:
            continue  # a value goes on in the next line
        if path := _path_of(parsed):
            is_header = lines[0].lstrip().startswith("[")
            table = path if is_header else table
            yield number - len(lines) + 1, path if is_header else [*table, *path], [] if is_header else lines
        lines = []


def _path_of(parsed: Any) -> list[str]:
    """The keys of a file with one statement."""
    if isinstance(parsed, list) and parsed:
        return _path_of(parsed[-1]) if isinstance(parsed[-1], dict) else []
    if not isinstance(parsed, dict) or len(parsed) != 1:
        return []
    [(key, value)] = parsed.items()
    return [key, *_path_of(value)]


def _line_in_list(lines: list[str], keys: Sequence[str]) -> int:
    """How many lines below its first one a statement has the element with the index `keys[0]`."""
    for count in range(1, len(lines)):
        try:
            value: Any = tomllib.loads("\n".join([*lines[:count], "]"]))
        except tomllib.TOMLDecodeError:
            continue
        for key in _path_of(value):
            value = value[key]
        if keys and keys[0].isdecimal() and len(value) > int(keys[0]):
            return count - 1
    return len(lines) - 1 if keys and keys[0].isdecimal() else 0


def _one_begins_the_other(one: Keys, other: Keys) -> bool:
    return bool(one and other) and all(a == b for a, b in zip(one, other, strict=False))

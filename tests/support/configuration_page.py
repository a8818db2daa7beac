"""`docs/configuration.md`, generated from the settings themselves: types, defaults and docstrings.

    PYTHONPATH=tests python -m support.configuration_page > docs/configuration.md

`make docs` runs this; `tests/test_docs.py` compares the page with the settings.
"""

import ast
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic import SecretStr
from pydantic_core import PydanticUndefined

from headpond.config.declared import declarations
from headpond.config.run import RunConfig
from headpond.declarations.sections import Section, is_value, table_of

HEAD = """\
# Configuration

Generated from the docstrings of the settings by `make docs`. Do not edit this page.

A run reads one TOML file, then `HEADPOND_*` variables, then flags; the last one that sets a value wins. Orchestrator,
workers and session server read the same file.

- `headpond run CONFIG.toml` and `headpond sessions CONFIG.toml` take the file as an argument; workers read the one that
  `HEADPOND_CONFIG` names.
- `HEADPOND_SECTION__KEY` sets `key` of `[section]`: `HEADPOND_RECOVERY__LEASE_S=5`. Lists of addresses and
  names are separated by commas; other lists, and tables, are values of TOML:
  `HEADPOND_POLICY__SAMPLING__STOP='["#"]'`.
- Secrets belong in variables: the password of Redis in `HEADPOND_REDIS_URL`, the key of the engine in
  `HEADPOND_ENGINE__API_KEY`.
- A wrong key, value or type is an error that names the file and the line, and the nearest setting.
- **At resume**, a setting that is `fixed` must have the value that the run was started with, and `headpond run` refuses
  another one; a setting that is `free` takes effect with its new value.
- **Restart** names the processes, beside the orchestrator, that read the setting when they start: `rollouts` and
  `compute` are workers, `sessions` is `headpond sessions`, `trainer` is your program, which must agree. `headpond run`
  logs what has changed at a resume, and `headpond status` shows it.
"""
SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
NAMES: dict[object, str] = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "string",
    Path: "path",
    SecretStr: "secret",
}


DECLARED = dict(declarations(RunConfig))


class Setting(NamedTuple):
    """A row of a table."""

    setting: str
    type: str
    default: str
    at_resume: str
    restart: str
    meaning: str


def page() -> str:
    return "\n".join([HEAD, *_section(RunConfig, "")])


def _section(section: type[Section], path: str) -> Iterator[str]:
    """A heading, a table of the settings of `section`, and then its tables, depth first."""
    inside = f"{path}." if path else ""
    settings = [_setting(inside, *entry) for entry in _fields(section) if is_value(entry[1])]
    if path:
        yield f"## `[{path}]`\n"
        if doc := " ".join((section.__doc__ or "").split()):
            yield f"{doc}\n"
    else:
        yield "## Outside of any section\n"
    if settings:
        yield f"| {' | '.join(Setting._fields)} |\n{'|---' * len(Setting._fields)}|".replace("_", " ")
        yield from ("| " + " | ".join(setting) + " |" for setting in settings)
        yield ""
    for name, annotation, _, _ in _fields(section):
        if (table := table_of(annotation)) and table.section:
            named = ".NAME" if table.by_name else ""
            yield from _section(table.section, f"{inside}{name}{named}")


def _fields(section: type[Section]) -> Iterator[tuple[str, Any, Any, str]]:
    """Name, annotation, default and docstring of each setting."""
    docs, hints = _attribute_docs(section), get_type_hints(section, include_extras=True)
    for name, field in section.model_fields.items():
        yield name, hints[name], field.get_default(call_default_factory=True), docs.get(name, "")


def _setting(inside: str, name: str, annotation: Any, default: Any, doc: str) -> Setting:
    declared = DECLARED[inside + name]
    return Setting(
        setting=f"`{name}`",
        type=_type(annotation),
        default=_default(default),
        at_resume="fixed" if declared.fixed else "free",
        restart="" if declared.fixed else ", ".join(declared.restarts),
        meaning=(doc[:1].upper() + doc[1:]).removesuffix(".").replace("|", "\\|"),
    )


def _type(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(parts[0]) + _bounds(parts[1:])
    if origin in (Union, UnionType):
        return " or ".join(_type(part) for part in parts if part is not NoneType)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(part)}`" for part in parts)
    if origin is tuple:
        return f"list of {_type(parts[0])}s"
    if origin is not None:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{json.dumps(member.value)}`" for member in annotation)
    return NAMES.get(annotation, "table")


def _bounds(metadata: tuple[Any, ...]) -> str:
    constraints = [each for entry in metadata for each in getattr(entry, "metadata", [entry])]
    limits = {name: getattr(each, name) for each in constraints for name in SIGNS if hasattr(each, name)}
    if limits.keys() == {"ge", "le"}:
        return f", {limits['ge']} to {limits['le']}"
    if max(map(abs, limits.values()), default=0) >= 2**63:
        return " of 64 bits"
    return " and".join(f" {SIGNS[name]} {limit}" for name, limit in limits.items())


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "unset"
    if isinstance(value, bool | str | tuple | dict | Path | Enum):
        plain = value.value if isinstance(value, Enum) else str(value) if isinstance(value, Path) else value
        return f"`{json.dumps(plain)}`"
    return f"`{value:_}`" if isinstance(value, int) and value >= 10_000 else f"`{value:g}`"


def _attribute_docs(section: type[Section]) -> dict[str, str]:
    """The string under each attribute, on one line, those of base classes too."""
    bases = (base for base in reversed(section.__mro__) if issubclass(base, Section) and base is not Section)
    return {name: text for base in bases for name, text in _own_docs(base).items()}


def _own_docs(section: type[Section]) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, below in pairwise(body.body):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
            case _:
                pass
    return docs


if __name__ == "__main__":
    sys.stdout.write(page())

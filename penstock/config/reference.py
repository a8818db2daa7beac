"""`docs/configuration.md`, generated from the settings themselves: types, defaults and docstrings.

    python -m penstock.config.reference > docs/configuration.md

`make docs` runs this; `tests/test_docs.py` compares the page with the settings.
"""

import ast
import dataclasses
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

from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticUndefined

from penstock.config.run import RunConfig
from penstock.config.sections import entry_section, is_section

HEAD = """\
# Configuration

Generated from the docstrings of the settings by `make docs`. Do not edit this page.

A run reads one TOML file, then `PENSTOCK_*` variables, then flags; the last one that sets a value wins. Orchestrator,
workers and session server read the same file.

- `penstock run CONFIG.toml` and `penstock sessions CONFIG.toml` take the file as an argument; workers read the one that
  `PENSTOCK_CONFIG` names.
- `PENSTOCK_SECTION__KEY` sets `key` of `[section]`: `PENSTOCK_RECOVERY__LEASE_S=5`. Lists are separated by commas.
- Secrets belong in variables: the password of Redis in `PENSTOCK_REDIS_URL`, the key of the engine in
  `PENSTOCK_ENGINE__API_KEY`.
- An unknown key is an error that names the file, the line and the nearest setting.
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


class Setting(NamedTuple):
    name: str
    type: str
    default: str
    doc: str


def page() -> str:
    return "\n".join([HEAD, *_section(RunConfig, "")])


def _section(model: type, path: str) -> Iterator[str]:
    """A heading, a table of the settings of `model`, and then its tables, depth first."""
    settings = [_setting(*entry) for entry in _fields(model) if not _inner(entry[1])]
    if path:
        yield f"## `[{path}]`\n"
        if doc := _class_doc(model):
            yield f"{doc}\n"
    else:
        yield "## Outside of any section\n"
    if settings:
        yield "| setting | type | default | meaning |\n|---|---|---|---|"
        yield from ("| " + " | ".join(setting) + " |" for setting in settings)
        yield ""
    for name, annotation, _, _ in _fields(model):
        if inner := _inner(annotation):
            named = ".NAME" if entry_section(annotation) else ""
            yield from _section(inner, f"{path}.{name}{named}".lstrip("."))


def _fields(model: type) -> Iterator[tuple[str, Any, Any, str]]:
    """Name, annotation, default and docstring of each setting of a pydantic model or a dataclass."""
    docs, hints = _attribute_docs(model), get_type_hints(model, include_extras=True)
    if issubclass(model, BaseModel):
        defaults = {name: field.get_default(call_default_factory=True) for name, field in model.model_fields.items()}
    else:
        defaults = {field.name: _dataclass_default(field) for field in dataclasses.fields(model)}
    for name, default in defaults.items():
        yield name, hints[name], default, docs.get(name, "")


def _dataclass_default(field: "dataclasses.Field[Any]") -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _setting(name: str, annotation: Any, default: Any, doc: str) -> Setting:
    meaning = (doc[:1].upper() + doc[1:]).removesuffix(".")
    return Setting(f"`{name}`", _type(annotation), _default(default), meaning.replace("|", "\\|"))


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


def _inner(annotation: Any) -> type | None:
    """The model of a table of settings, or of each entry of a table of tables."""
    if entry := entry_section(annotation):
        return entry
    candidates = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return next((each for each in candidates if is_section(each)), None)


def _class_doc(model: type) -> str:
    doc = model.__doc__ or ""
    return "" if doc.startswith(f"{model.__name__}(") else " ".join(doc.split())


def _attribute_docs(model: type) -> dict[str, str]:
    """The string under each attribute, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
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

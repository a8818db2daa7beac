"""Base class and common types of the configuration's sections, and how a section is recognised by its type."""

import dataclasses
from typing import Annotated, Any, TypeGuard, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _split(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


CommaSeparated = Annotated[tuple[str, ...], BeforeValidator(_split)]
"""A list in TOML; one string, separated by commas, in an environment variable or a flag."""
Fraction = Annotated[float, Field(ge=0, le=1)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Section(BaseModel):
    # A wrong value may hold a password: no error repeats it.
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True)


def is_section(kind: object) -> TypeGuard[type[Any]]:
    """A section is a pydantic model, or a dataclass: `filters` and `advantages` do without pydantic."""
    return isinstance(kind, type) and (issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind))


def entry_section(annotation: object) -> type[Any] | None:
    """The section of each entry of a table of tables, such as `[environments.NAME]`."""
    entry = get_args(annotation)[1] if get_origin(annotation) is dict else None
    return entry if is_section(entry) else None

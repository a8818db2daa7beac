"""Base class and common types of the configuration's sections, and how tables of settings are recognised by type."""

from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _split(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


CommaSeparated = Annotated[tuple[str, ...], BeforeValidator(_split)]
"""A list in TOML; one string, separated by commas, in an environment variable or a flag."""
Fraction = Annotated[float, Field(ge=0, le=1)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,  # a wrong value may hold a password
    )


class Table(NamedTuple):
    """A setting that is a table."""

    section: type[Section] | None
    """Of its settings, or of those of each entry; None where its keys are not Penstock's."""
    by_name: bool
    """Whether its keys are names, as in `[environments.NAME]`."""


def table_of(annotation: Any) -> Table | None:
    """The table that a setting of this type is, also beside a shorter form (`policy.renderer`)."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return table_of(parts[0])
    if origin in (Union, UnionType):
        return next((table for part in parts if (table := table_of(part))), None)
    if origin in (dict, Mapping):
        inner = table_of(parts[1])
        return Table(inner.section if inner else None, by_name=True)
    return (
        Table(annotation, by_name=False) if isinstance(annotation, type) and issubclass(annotation, Section) else None
    )


def is_value(annotation: Any) -> bool:
    """Whether a setting of this type can be given as a value: not where it is always a table of settings."""
    table = table_of(annotation)
    return table is None or table.section is None or get_origin(annotation) in (Union, UnionType)

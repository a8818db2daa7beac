"""Base class and common types of the configuration's sections."""

from typing import Annotated

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

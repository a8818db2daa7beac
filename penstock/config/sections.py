"""What every section of the configuration is."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _separated(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Words = Annotated[tuple[str, ...], BeforeValidator(_separated)]
"""As a variable or a flag: separated by commas."""
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    # A wrong value may hold a password: no error repeats it.
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True)

"""`[batch.fields.NAME]`: the declaration of a field for the trainer."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from headpond.fields import DTYPES, FieldSource, FieldType, Per, TrainerField
from headpond.sections import Reader, Section, read_by

MOST_FIELDS = 32
FieldName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,39}$")]


class FieldSettings(Section):
    """A field for the trainer, from scores or turns to the micro-batch. See trainers.md, "A field of your own"."""

    declared = read_by(Reader.ORCHESTRATOR, Reader.ROLLOUTS, Reader.SESSIONS, Reader.TRAINER)

    source: FieldSource = "score"
    """Where its values come from: `Score.columns`, or the turns (`Completion.fields`, or the engine's response)."""
    per: Per = "token"
    """Whether every token has a value, or every sample."""
    dtype: FieldType = "f32"
    """Type of its values."""
    default: float | Literal["required"] = 0.0
    """The value where none is given: context of a turn, padding, rollouts without it. `"required"`: a scored rollout
    without it fails; padding is 0."""

    def named(self, name: str) -> TrainerField:
        default = None if self.default == "required" else self.default
        return TrainerField(name=name, source=self.source, per=self.per, dtype=self.dtype, default=default)

    @model_validator(mode="after")
    def _check_default(self) -> "FieldSettings":
        dtype, default = DTYPES[self.dtype], 0.0 if self.default == "required" else self.default
        limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
        if not limits.min <= default <= limits.max or (dtype.kind != "f" and not default.is_integer()):
            raise ValueError(f"default = {default:g} is not a value of {self.dtype}")
        return self

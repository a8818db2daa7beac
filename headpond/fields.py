"""Fields for the trainer. `[batch.fields.NAME]` declares one, a turn or a score sets its values, a
micro-batch has it.

Configuration, recording and batches share this declaration. Every value is checked where it is
set: a wrong value is an error of its own rollout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headpond.errors import StageError

Array = NDArray[Any]
FieldSource = Literal["score", "turn"]
Per = Literal["token", "sample"]
FieldType = Literal["f32", "f64", "i32", "i64", "u8"]

DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(f"{name[0]}{int(name[1:]) // 8}") for name in FieldType.__args__}
# Kind of a field's dtype -> kinds of the values that it accepts.
CONVERTIBLE = {"f": "fiub", "i": "iub", "u": "iub"}
# Kind of a NumPy dtype -> its name in an error, for kinds that NumPy shows as a code like `<U4`.
KINDS = {"U": "text", "S": "bytes", "O": "object"}


@dataclass(frozen=True, kw_only=True)
class TrainerField:
    name: str
    source: FieldSource = "score"
    per: Per = "token"
    dtype: FieldType = "f32"
    default: float | None = 0  # None: every turn, or every score, must have a value.

    @property
    def setting(self) -> str:
        return f"batch.fields.{self.name}"

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.dtype]

    @property
    def filling(self) -> float:
        """The value for missing entries, such as padding."""
        return self.default or 0

    def converted(self, raw: Any, what: str, *, length: int | None) -> Array:
        """Convert values to the field's dtype: one number, or `length` of them. Raise StageError
        for anything else."""
        try:
            values = np.asarray(raw)
        except ValueError as error:  # The lists have different lengths.
            raise StageError(f"{self.setting}: {what} has values that are not an array: {error}") from error
        if values.dtype.kind not in CONVERTIBLE[self.numpy_dtype.kind]:
            raise StageError(
                f"{self.setting}: {what} has values of type {KINDS.get(values.dtype.kind, values.dtype)}: the field is "
                f"declared as {self.dtype}"
            )
        if values.shape not in ((), (length,)):
            expected = "one number" if length is None else f"one number or {length}"
            raise StageError(f"{self.setting}: {what} has an array of shape {values.shape}, expected {expected}")
        with np.errstate(over="ignore"):
            converted = values.astype(self.numpy_dtype)
        if converted.dtype.kind == "f" and not np.isfinite(converted).all():
            raise StageError(f"{self.setting}: {what} has NaN or infinite values: they must be finite in {self.dtype}")
        if values.dtype.kind != "f" and not np.array_equal(converted, values):
            raise StageError(f"{self.setting}: {what} has values that {self.dtype} cannot hold")
        return converted


@dataclass(frozen=True, kw_only=True)
class FieldValues:
    """A rollout's values for the declared fields."""

    declared: tuple[TrainerField, ...] = ()
    score: Mapping[str, Any] = field(default_factory=dict[str, Any])  # `Score.columns`.
    # `Completion.fields` by turn.
    turns: Mapping[int, Mapping[str, Any]] = field(default_factory=dict[int, Mapping[str, Any]])
    required: bool = True  # False for a rollout that failed: its loss mask is 0.
    turn_rewards: Sequence[float] | None = None  # `Score.turn_rewards`.


NO_FIELDS = FieldValues()

"""The trainer's fields of a rollout as columns: from its score, or from what its turns carry."""

import difflib

import numpy as np

from penstock.errors import StageError
from penstock.fields import Array, FieldValues, TrainerField
from penstock.recording.sample_columns import FieldColumns
from penstock.recording.sample_tree import SampleTree


def field_columns(samples: SampleTree, values: FieldValues) -> FieldColumns:
    """A field without any value has no column: the batch has its default there. StageError for a value that is wrong,
    missing, or of a field that is not declared."""
    _refuse_undeclared(values)
    by_token, by_sample = dict[str, Array](), dict[str, Array]()
    for field in values.declared:
        if field.source == "score":
            column = _from_score(field, samples, values)
        else:
            column = _from_turns(field, samples, values)
        if column is not None:
            (by_token if field.per == "token" else by_sample)[field.name] = column
    return FieldColumns(by_token=by_token, by_sample=by_sample, turn_rewards=_turn_rewards(samples, values))


def _turn_rewards(samples: SampleTree, values: FieldValues) -> Array | None:
    if values.turn_rewards is None:
        return None
    if len(values.turn_rewards) != len(samples.turns):
        raise StageError(
            f"Score.turn_rewards has {len(values.turn_rewards)} rewards for {len(samples.turns)} turns: return one for "
            "each turn"
        )
    return np.array(values.turn_rewards, np.float64)


def _refuse_undeclared(values: FieldValues) -> None:
    given = {"score": values.score.keys(), "turn": {name for turn in values.turns.values() for name in turn}}
    for source, names in given.items():
        declared = {field.name for field in values.declared if field.source == source}
        if undeclared := sorted(names - declared):
            raise StageError(_undeclared(undeclared[0], source, values.declared))


def _undeclared(name: str, source: str, declared: tuple[TrainerField, ...]) -> str:
    places = {"score": "Score.columns", "turn": "completion.fields"}
    where = f"{places[source]} has {name!r}, which is"
    for field in declared:
        if field.name == name:
            return (
                f'{where} declared with source = "{field.source}": set it in {places[field.source]}, or change '
                f"{field.setting}.source"
            )
    near = difflib.get_close_matches(name, [field.name for field in declared if field.source == source], n=1)
    hint = f"did you mean {near[0]!r}? Else " if near else ""
    return f'{where} not declared: {hint}add [batch.fields.{name}] with source = "{source}"'


def _from_score(field: TrainerField, samples: SampleTree, values: FieldValues) -> Array | None:
    if field.name not in values.score:
        if values.required and field.default is None:
            raise StageError(f"Score.columns has no {field.name!r}: return it, or set {field.setting}.default")
        return None
    lengths = samples.lengths()
    length = sum(lengths) if field.per == "token" else len(lengths)
    converted = field.converted(values.score[field.name], "Score.columns", length=length)
    return np.full(length, converted, field.numpy_dtype)


def _from_turns(field: TrainerField, samples: SampleTree, values: FieldValues) -> Array | None:
    """A token has the value of the turn that sampled it; a sample has that of its last turn with a value."""
    offsets, found = samples.offsets(), False
    column = np.full(offsets[-1] if field.per == "token" else offsets.size - 1, field.filling, field.numpy_dtype)
    for number, turn in enumerate(samples.turns):
        given = values.turns.get(turn.arrival, {}).get(field.name, turn.fields.get(field.name))
        if given is None:
            if values.required and field.default is None and turn.completion_ids.size:
                raise StageError(f"turn {number} has no field {field.name!r}: set it, or {field.setting}.default")
            continue
        found = True
        if field.per == "token":
            first = offsets[samples.sample_of[number]]
            converted = field.converted(given, f"turn {number}", length=len(turn.completion_ids))
            column[first + turn.start : first + turn.end] = converted
        else:
            column[samples.sample_of[number]] = field.converted(given, f"turn {number}", length=None)
    return column if found else None

"""The samples of a rollout as the columns of the store, and as its `Recorded`.

The trainer's fields come from the rollout's score, or from its turns.
"""

import difflib
from collections.abc import Sequence
from itertools import islice

import numpy as np

from headpond.errors import StageError
from headpond.fields import NO_FIELDS, Array, FieldValues, TrainerField
from headpond.recording.sample_tree import Offsets, SampleTree
from headpond.records.rollout import AGENTS_LIMIT, Recorded
from headpond.spans import TimedSpan
from headpond.store import BlobRef
from headpond.store.columns import Columns, TurnTable
from headpond.turn import HIT_MAX_TOKENS, Ids, Mask


def columns_of(
    tree: SampleTree,
    *,
    rollout: str,
    attempt: int,
    logprobs_mode: str,
    error: str = "",
    fields: FieldValues = NO_FIELDS,
    conversation: bytes = b"",
    spans: Sequence[TimedSpan] = (),
) -> Columns:
    """Convert the samples to columns. Context has loss mask 0 and logprob 0, even if another sample
    trains on it.

    A turn that no client saw has loss mask 0. If the rollout ended in an error, the mask is 0
    everywhere.
    """
    offsets = tree.offsets()
    input_ids, logprobs = np.empty(offsets[-1], np.int32), np.zeros(offsets[-1], np.float32)
    loss_mask = np.zeros(offsets[-1], np.uint8)
    for offset, sample in zip(offsets, tree.samples, strict=False):
        for number in (*sample.shared, *sample.turns):
            turn = tree.turns[number]
            begin, start, end = (offset + at for at in (turn.prefix_tokens, turn.start, turn.end))
            input_ids[begin:start], input_ids[start:end] = turn.prompt_ids, turn.completion_ids
        for number in sample.turns:
            turn = tree.turns[number]
            logprobs[offset + turn.start : offset + turn.end] = turn.completion_logprobs
            if not error and number not in tree.unseen:
                mask = 1 if turn.completion_mask is None else turn.completion_mask
                loss_mask[offset + turn.start : offset + turn.end] = mask
    support_ids, support_offsets = _support(tree, offsets)
    turns_by_sample = [[tree.turns[number] for number in sample.turns] for sample in tree.samples]
    turns = _turn_table(tree, offsets, _turn_rewards(tree, fields))
    token_fields, sample_fields = field_columns(tree, fields)
    return Columns(
        rollout=rollout,
        attempt=attempt,
        logprobs_mode=logprobs_mode,
        error=error,
        input_ids=input_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        sample_offsets=offsets,
        first_prompt_length=np.array([turns[0].start for turns in turns_by_sample], np.int32),
        truncated=np.array([any(turn.truncated for turn in turns) for turns in turns_by_sample], np.uint8),
        overlong_prompt=np.array([any(turn.overlong_prompt for turn in turns) for turns in turns_by_sample], np.uint8),
        parent=np.array([sample.parent for sample in tree.samples], np.int32),
        agent=np.array([turns.words["agent"].index(sample.agent) for sample in tree.samples], np.int32),
        turns=turns,
        **_span_columns(tree, offsets),
        metrics=tree.metrics(),
        spans=[list(span) for span in spans],
        token_fields=token_fields,
        sample_fields=sample_fields,
        conversation=np.frombuffer(conversation, np.uint8),
        support_ids=support_ids,
        support_offsets=support_offsets,
    )


def routed_valid_of(tree: SampleTree) -> Mask:
    """1 for each token whose routed row was received, else 0."""
    offsets = tree.offsets()
    valid = np.zeros(offsets[-1], np.uint8)
    for chunk in tree.chunks():
        first = offsets[chunk.sample] + chunk.first
        valid[first : first + chunk.rows] = 1
    return valid


def _support(tree: SampleTree, offsets: Offsets) -> tuple[Ids | None, Offsets | None]:
    """The sets that the tokens were drawn from, in the order of the tokens; context has empty ones."""
    lengths, ids = np.zeros(offsets[-1], np.int64), list[Ids]()
    for start, sample in zip(offsets, tree.samples, strict=False):
        for turn in (tree.turns[number] for number in sample.turns):
            if turn.support_ids is not None and turn.support_lengths is not None:
                lengths[start + turn.start : start + turn.end] = turn.support_lengths
                ids.append(turn.support_ids)
    return (np.concatenate(ids), np.concatenate([[0], np.cumsum(lengths)])) if ids else (None, None)


def _turn_table(tree: SampleTree, offsets: Offsets, rewards: Array | None) -> TurnTable:
    turns, sample = tree.turns, np.array(tree.sample_of, np.int32)
    named = {
        "finish_reason": [turn.finish_reason for turn in turns],
        "agent": [turn.agent for turn in turns],
        "engine": [turn.engine for turn in turns],
        "sampling": [turn.sampling for turn in turns],
    }
    words = {name: list(dict.fromkeys(values)) for name, values in named.items()}
    numbers = {
        name: np.array([words[name].index(value) for value in values], np.int32) for name, values in named.items()
    }
    return TurnTable(
        sample=sample,
        start=offsets[sample] + np.array([turn.start for turn in turns], np.int64),
        end=offsets[sample] + np.array([turn.end for turn in turns], np.int64),
        version_first=np.array([turn.version_first for turn in turns], np.int32),
        version_last=np.array([turn.version_last for turn in turns], np.int32),
        version_exact=np.array([turn.version_exact and turn.answered_at is None for turn in turns], np.uint8),
        unseen=np.array([number in tree.unseen for number in range(len(turns))], np.uint8),
        begun_at=np.array([turn.begun_at for turn in turns], np.float64),
        seconds=np.array([turn.seconds for turn in turns], np.float32),
        temperature=np.array([turn.temperature for turn in turns], np.float32),
        reward=np.full(len(turns), np.nan) if rewards is None else rewards,
        **numbers,
        words=words,
    )


def _span_columns(tree: SampleTree, offsets: Offsets) -> dict[str, Array]:
    spans = [(number, turn, span) for number, turn in enumerate(tree.turns) for span in turn.version_spans]
    starts = [offsets[tree.sample_of[number]] + turn.start + span.start for number, turn, span in spans]
    return {
        "span_turn": np.array([number for number, _, _ in spans], np.int32),
        "span_start": np.array(starts, np.int64),
        "span_version": np.array([span.version for _, _, span in spans], np.int32),
    }


def field_columns(samples: SampleTree, values: FieldValues) -> tuple[dict[str, Array], dict[str, Array]]:
    """Convert the trainer's fields, by token and by sample. A field without any value has no column: the batch has its
    default there.

    StageError for a value that is wrong, missing, or of a field that is not declared.
    """
    _refuse_undeclared(values)
    by_token, by_sample = dict[str, Array](), dict[str, Array]()
    for declared in values.declared:
        if declared.source == "score":
            column = _from_score(declared, samples, values)
        else:
            column = _from_turns(declared, samples, values)
        if column is not None:
            (by_token if declared.per == "token" else by_sample)[declared.name] = column
    return by_token, by_sample


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
    present = {"score": values.score.keys(), "turn": {name for turn in values.turns.values() for name in turn}}
    for source, names in present.items():
        declared = {field.name for field in values.declared if field.source == source}
        if undeclared := sorted(names - declared):
            raise StageError(_undeclared(undeclared[0], source, values.declared))


def _undeclared(name: str, source: str, declared: tuple[TrainerField, ...]) -> str:
    places = {"score": "Score.columns", "turn": "completion.fields"}
    where = f"{places[source]} has {name!r}, which is"
    for declared_field in declared:
        if declared_field.name == name:
            return (
                f'{where} declared with source = "{declared_field.source}": set it in {places[declared_field.source]}, '
                f"or change {declared_field.setting}.source"
            )
    near = difflib.get_close_matches(
        name, [declared_field.name for declared_field in declared if declared_field.source == source], n=1
    )
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
    offsets, has_values = samples.offsets(), False
    column = np.full(offsets[-1] if field.per == "token" else offsets.size - 1, field.filling, field.numpy_dtype)
    for number, turn in enumerate(samples.turns):
        value = values.turns.get(turn.arrival, {}).get(field.name, turn.fields.get(field.name))
        if value is None:
            if values.required and field.default is None and turn.completion_ids.size:
                raise StageError(f"turn {number} has no field {field.name!r}: set it, or {field.setting}.default")
            continue
        has_values = True
        if field.per == "token":
            first = offsets[samples.sample_of[number]]
            converted = field.converted(value, f"turn {number}", length=len(turn.completion_ids))
            column[first + turn.start : first + turn.end] = converted
        else:
            column[samples.sample_of[number]] = field.converted(value, f"turn {number}", length=None)
    return column if has_values else None


def recorded(tree: SampleTree, columns: BlobRef, experts: BlobRef | None) -> Recorded:
    turns, lengths, prompt_tokens = tree.turns, tree.lengths(), tree.prompt_tokens()
    completion_tokens = sum(len(turn.completion_ids) for turn in turns)
    return Recorded(
        columns=columns,
        experts=experts,
        sample_lengths=tuple(lengths),
        version_first=min(turn.version_first for turn in turns),
        version_last=max(turn.version_last for turn in turns),
        inexact_tokens=tree.inexact_tokens(),
        turns=len(turns),
        prompt_tokens=prompt_tokens,
        tool_tokens=sum(lengths) - prompt_tokens - completion_tokens,
        completion_tokens=completion_tokens,
        truncated=any(turn.truncated for turn in turns),
        hit_max_tokens=turns[-1].finish_reason == HIT_MAX_TOKENS,
        agents=dict(islice(tree.tokens_by_agent().items(), AGENTS_LIMIT)),
        metrics=tree.metrics(),
    )

"""The samples of a rollout as the columns of the store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.fields import Array
from penstock.recording.sample_tree import Offsets, SampleTree
from penstock.spans import TimedSpan
from penstock.store.columns import Columns, TurnTable
from penstock.turn import Ids, Mask


@dataclass(frozen=True, kw_only=True)
class FieldColumns:
    """The trainer's fields of a rollout, see field_columns.py."""

    by_token: Mapping[str, Array] = field(default_factory=dict[str, Array])
    by_sample: Mapping[str, Array] = field(default_factory=dict[str, Array])
    turn_rewards: Array | None = None


NO_COLUMNS = FieldColumns()


def columns_of(
    tree: SampleTree,
    *,
    rollout: str,
    attempt: int,
    logprobs_mode: str,
    error: str = "",
    fields: FieldColumns = NO_COLUMNS,
    conversation: bytes = b"",
    spans: Sequence[TimedSpan] = (),
) -> Columns:
    """Context has loss mask 0 and logprob 0, also where it is the completion of a turn that another sample has. The
    loss mask of a turn that no client saw is 0; if the rollout ended in an error, it is 0 everywhere."""
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
    own = [[tree.turns[number] for number in sample.turns] for sample in tree.samples]
    turns = _turn_table(tree, offsets, fields.turn_rewards)
    return Columns(
        rollout=rollout,
        attempt=attempt,
        logprobs_mode=logprobs_mode,
        error=error,
        input_ids=input_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        sample_offsets=offsets,
        first_prompt_length=np.array([turns[0].start for turns in own], np.int32),
        truncated=np.array([any(turn.truncated for turn in turns) for turns in own], np.uint8),
        overlong_prompt=np.array([any(turn.overlong_prompt for turn in turns) for turns in own], np.uint8),
        parent=np.array([sample.parent for sample in tree.samples], np.int32),
        agent=np.array([turns.words["agent"].index(sample.agent) for sample in tree.samples], np.int32),
        turns=turns,
        **_span_columns(tree, offsets),
        metrics=tree.metrics(),
        spans=[list(span) for span in spans],
        token_fields=fields.by_token,
        sample_fields=fields.by_sample,
        conversation=np.frombuffer(conversation, np.uint8),
        support_ids=support_ids,
        support_offsets=support_offsets,
    )


def routed_valid_of(tree: SampleTree) -> Mask:
    """For each token, whether its routed row was received."""
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

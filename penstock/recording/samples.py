"""Turns -> samples: a turn extends the longest sample that its prompt begins with, or starts a new one.

Only what a turn adds is kept. Its routed rows are placed by absolute token position and written to the experts file.
`columns_of` turns the samples into the columns of the store.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import Invariant, PolicyFailure
from penstock.fields import Array
from penstock.store.columns import Columns, TurnTable
from penstock.store.experts import Chunk
from penstock.turn import (
    Fingerprint,
    Ids,
    Logprobs,
    Mask,
    OpenSample,
    Routes,
    Rows,
    SaidVersion,
    Turn,
    TurnMetadata,
    VersionSpan,
)

Offsets = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnDelta:
    """What a turn adds to its sample. Its routed rows are in the experts file."""

    sample: int
    prefix_tokens: int
    prompt_ids: Ids
    completion_ids: Ids
    completion_logprobs: Logprobs
    completion_mask: Mask | None = None
    chunks: tuple[Chunk, ...]
    agent: str
    engine: str
    version_first: int
    """The lowest policy version that may have sampled one of its tokens."""
    version_last: int
    """The highest one."""
    temperature: float
    sampling: str
    finish_reason: str
    truncated: bool
    overlong_prompt: bool
    matches: int
    """Number of samples that the prompt begins with."""
    unknown_logprobs: int = 0
    """Completion tokens without a logprob: masked."""
    routes_absent: bool = False
    """Whether routed experts were requested and the response had none of the new rows."""
    broken_at: int | None
    """If the turn starts a sample: the position at which its prompt differs from the sample that its agent extended
    last."""
    fields: Mapping[str, Array] = field(default_factory=dict[str, Array])
    """Fields for the trainer that the engine's response had: one number, or one per completion token."""
    version_exact: bool = False
    """Whether every token was sampled by `version_first`, or by the version that `version_spans` names."""
    version_spans: tuple[VersionSpan, ...] = ()
    """If the response states several versions."""
    answered_at: float | None = None
    """As in `TurnMetadata`, until the version is settled."""
    support_ids: Ids | None = None
    """The tokens that each completion token was drawn from, one set after the other."""
    support_lengths: Ids | None = None

    @property
    def nbytes(self) -> int:
        optional = (self.completion_mask, self.support_ids, self.support_lengths)
        arrays = [array for array in optional if array is not None] + list(self.fields.values())
        arrays += [self.prompt_ids, self.completion_ids, self.completion_logprobs]
        return sum(array.nbytes for array in arrays)

    @property
    def start(self) -> int:
        """Position of its completion in the sample."""
        return self.prefix_tokens + len(self.prompt_ids)

    @property
    def end(self) -> int:
        return self.start + len(self.completion_ids)


@dataclass(frozen=True, kw_only=True)
class FieldColumns:
    """The trainer's fields of a rollout, see field_columns.py."""

    by_token: Mapping[str, Array] = field(default_factory=dict[str, Array])
    by_sample: Mapping[str, Array] = field(default_factory=dict[str, Array])


NO_COLUMNS = FieldColumns()


@dataclass(kw_only=True)
class _Sample:
    sequence: Fingerprint = field(default_factory=Fingerprint)
    turns: list[int] = field(default_factory=list[int])
    rows_until: int = 0

    @property
    def open_sample(self) -> OpenSample:
        tokens = self.sequence.tokens
        return OpenSample(sequence=self.sequence, rows_from=tokens if self.rows_until == tokens else max(0, tokens - 1))


class Samples:
    """The samples of one rollout. Each turn extends one or adds one."""

    def __init__(self, *, max_samples: int | None = None) -> None:
        self.turns: list[TurnDelta] = []
        self.nbytes = 0
        """Size of the arrays of all turns."""
        self._samples: list[_Sample] = []
        self._max_samples = max_samples

    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return [sample.sequence.tokens for sample in self._samples]

    def offsets(self) -> Offsets:
        """Bounds of the samples when they are one after the other."""
        return np.cumsum([0, *self.lengths()], dtype=np.int64)

    def last_turns(self) -> list[int]:
        """The last turn of each sample."""
        return [sample.turns[-1] for sample in self._samples]

    def open_samples(self) -> list[OpenSample]:
        """For `read_turn`, to recognise the prompt of the next response."""
        return [sample.open_sample for sample in self._samples]

    def place(self, turn: Turn, metadata: TurnMetadata) -> tuple[TurnDelta, list[Rows]]:
        """What the turn will add, and the rows of its chunks. No side effects."""
        index = len(self._samples) if turn.extends is None else turn.extends
        sample = (_Sample() if turn.extends is None else self._samples[index]).open_sample
        if sample.sequence.tokens != turn.prefix_tokens:
            raise Invariant(
                f"sample {index} has {sample.sequence.tokens} tokens; the turn extends {turn.prefix_tokens}"
            )
        if self._max_samples is not None and index >= self._max_samples:
            raise PolicyFailure(
                f"the rollout breaks its prefix too often: {self._max_samples} samples are allowed (policy.max_samples)"
            )
        runs = _runs(turn.routes, sample.rows_from, turn.tokens) if turn.routes else []
        delta = TurnDelta(
            sample=index,
            prefix_tokens=turn.prefix_tokens,
            prompt_ids=turn.prompt_ids.copy(),  # a view would keep the whole array alive
            completion_ids=turn.completion_ids.copy(),
            completion_logprobs=turn.completion_logprobs.copy(),
            completion_mask=_mask_of(turn, metadata.completion_mask),
            chunks=tuple(Chunk(sample=index, first=first, rows=len(rows)) for first, rows in runs),
            agent=metadata.agent,
            engine=metadata.engine,
            **_versions(turn, metadata),
            temperature=metadata.temperature,
            sampling=metadata.sampling,
            finish_reason=turn.finish_reason or "",
            truncated=turn.truncated,
            overlong_prompt=turn.overlong_prompt,
            matches=turn.matches,
            unknown_logprobs=turn.unknown_logprobs,
            routes_absent=turn.routes_absent,
            broken_at=self._broken_at(turn, metadata.agent) if turn.extends is None else None,
            fields=turn.fields,
            support_ids=turn.sampling_mask.ids.copy() if turn.sampling_mask else None,
            support_lengths=turn.sampling_mask.lengths.copy() if turn.sampling_mask else None,
        )
        return delta, [rows for _, rows in runs]

    def add(self, delta: TurnDelta, sequence: Fingerprint | None = None) -> None:
        """`sequence` is the sample's fingerprint including this turn, if it is already computed."""
        if delta.sample == len(self._samples):
            self._samples.append(_Sample())
        sample = self._samples[delta.sample]
        sample.sequence = sequence or sample.sequence.extended(delta.prompt_ids, delta.completion_ids)
        sample.turns.append(len(self.turns))
        if delta.chunks:
            sample.rows_until = delta.chunks[-1].first + delta.chunks[-1].rows
        self.turns.append(delta)
        self.nbytes += delta.nbytes

    def unsettled(self) -> list[int]:
        """Turns whose version depends on what their replica says after the response."""
        return [index for index, turn in enumerate(self.turns) if turn.answered_at is not None]

    def settle_version(self, index: int, after: SaidVersion | None) -> None:
        """`after` is what the turn's replica said after its response; None if it said nothing."""
        turn = self.turns[index]
        versions = {turn.version_first, turn.version_last, after.version if after else turn.version_first}
        self.turns[index] = replace(
            turn,
            version_first=min(versions),
            version_last=max(versions),
            version_exact=turn.version_exact and after is not None and after.exact and len(versions) == 1,
            answered_at=None,
        )

    def inexact_tokens(self) -> int:
        """Completion tokens whose version is a range, or was not said by the engine."""
        return sum(len(turn.completion_ids) for turn in self.turns if not turn.version_exact or turn.answered_at)

    def ids(self, turn: int) -> Ids:
        """The sample of a turn up to the end of its completion."""
        turns = [self.turns[index] for index in self._samples[self.turns[turn].sample].turns if index <= turn]
        return np.concatenate([ids for delta in turns for ids in (delta.prompt_ids, delta.completion_ids)])

    def chunks(self) -> list[Chunk]:
        return [chunk for turn in self.turns for chunk in turn.chunks]

    def tokens_by_agent(self) -> dict[str, int]:
        """Completion tokens of each named agent, in the order of their first turns."""
        tokens: dict[str, int] = {}
        for turn in self.turns:
            if turn.agent:
                tokens[turn.agent] = tokens.get(turn.agent, 0) + len(turn.completion_ids)
        return tokens

    def metrics(self) -> dict[str, float]:
        """Counts of samples, turns and prefix breaks, where the first break is, and how many tokens are repeated as
        context because of breaks. `missing_routes` counts tokens without a row, except a sample's last, and
        `absent_routes` the turns without any; both are omitted if no rows were requested or sent."""
        broken_at = [turn.broken_at for turn in self.turns if turn.broken_at is not None]
        rows, absent = sum(chunk.rows for chunk in self.chunks()), sum(turn.routes_absent for turn in self.turns)
        expected = sum(max(sample.rows_until, sample.sequence.tokens - 1) for sample in self._samples)
        return {
            "samples": len(self._samples),
            "turns": len(self.turns),
            "breaks": len(broken_at),
            **({"first_break_position": broken_at[0]} if broken_at else {}),
            "wasted_tokens": sum(broken_at),
            "ambiguous_turns": sum(turn.matches > 1 for turn in self.turns),
            "unknown_logprobs": sum(turn.unknown_logprobs for turn in self.turns),
            **({"missing_routes": expected - rows, "absent_routes": absent} if rows or absent else {}),
        }

    def _broken_at(self, turn: Turn, agent: str) -> int | None:
        before = next((index for index in reversed(range(len(self.turns))) if self.turns[index].agent == agent), None)
        if before is None:
            return None
        held = self.ids(before)[: len(turn.prompt_ids)]
        differs = held != turn.prompt_ids[: len(held)]
        return int(np.argmax(differs)) if differs.any() else len(held)


def _versions(turn: Turn, metadata: TurnMetadata) -> dict[str, Any]:
    """A response that states the versions of its tokens is exact. One that states where it ended is, if the replica
    said the same before."""
    before = metadata.version
    said = before.version, turn.version if turn.version is not None else before.version
    if turn.version_spans:
        said = tuple(span.version for span in turn.version_spans)
    pending = not turn.version_spans and turn.version is None
    return {
        "version_first": min(said),
        "version_last": max(said),
        "version_exact": bool(turn.version_spans) or (before.exact and len(set(said)) == 1),
        "version_spans": turn.version_spans if len(turn.version_spans) > 1 else (),
        "answered_at": metadata.answered_at if pending else None,
    }


def _mask_of(turn: Turn, wanted: Mask | None) -> Mask | None:
    """The tokens to train on: those that the caller wants and that the response has everything for."""
    length = len(turn.completion_ids)
    if wanted is not None and len(wanted) < length:
        raise Invariant(f"a completion mask of {len(wanted)} entries for {length} tokens")
    masks = [mask[:length] for mask in (wanted, turn.completion_mask) if mask is not None]
    return np.minimum.reduce(masks) if masks else None


def _runs(routes: Routes, first: int, until: int) -> list[tuple[int, Rows]]:
    """Consecutive valid rows between positions `first` and `until`, each run with the position of its first row."""
    begin, end = max(0, first - routes.first), min(len(routes.rows), until - routes.first)
    if end <= begin:
        return []
    if routes.valid is None:
        return [(routes.first + begin, routes.rows[begin:end])]
    edges = np.flatnonzero(np.diff(routes.valid[begin:end], prepend=False, append=False)) + begin
    return [(routes.first + start, routes.rows[start:stop]) for start, stop in edges.reshape(-1, 2).tolist()]


def columns_of(
    samples: Samples,
    *,
    rollout: str,
    attempt: int,
    logprobs_mode: str,
    error: str = "",
    fields: FieldColumns = NO_COLUMNS,
    conversation: bytes = b"",
) -> Columns:
    """Context has loss mask 0 and logprob 0. If the rollout ended in an error, the loss mask is 0 everywhere."""
    offsets = samples.offsets()
    input_ids, logprobs = np.empty(offsets[-1], np.int32), np.zeros(offsets[-1], np.float32)
    loss_mask = np.zeros(offsets[-1], np.uint8)
    by_sample: list[list[TurnDelta]] = [[] for _ in offsets[1:]]
    for turn in samples.turns:
        by_sample[turn.sample].append(turn)
        begin, start, end = (offsets[turn.sample] + at for at in (turn.prefix_tokens, turn.start, turn.end))
        input_ids[begin:start], input_ids[start:end] = turn.prompt_ids, turn.completion_ids
        logprobs[start:end] = turn.completion_logprobs
        if not error:
            loss_mask[start:end] = 1 if turn.completion_mask is None else turn.completion_mask
    support_ids, support_offsets = _support(by_sample, offsets)
    return Columns(
        rollout=rollout,
        attempt=attempt,
        logprobs_mode=logprobs_mode,
        error=error,
        input_ids=input_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        sample_offsets=offsets,
        first_prompt_length=np.array([turns[0].start for turns in by_sample], np.int32),
        truncated=np.array([any(turn.truncated for turn in turns) for turns in by_sample], np.uint8),
        overlong_prompt=np.array([any(turn.overlong_prompt for turn in turns) for turns in by_sample], np.uint8),
        turns=_turn_table(samples.turns, offsets),
        **_span_columns(samples.turns, offsets),
        metrics=samples.metrics(),
        token_fields=fields.by_token,
        sample_fields=fields.by_sample,
        conversation=np.frombuffer(conversation, np.uint8),
        support_ids=support_ids,
        support_offsets=support_offsets,
    )


def _support(by_sample: Sequence[Sequence[TurnDelta]], offsets: Offsets) -> tuple[Ids | None, Offsets | None]:
    """The sets that the tokens were drawn from, in the order of the tokens; context has empty ones."""
    lengths, ids = np.zeros(offsets[-1], np.int64), list[Ids]()
    for start, turns in zip(offsets, by_sample, strict=False):
        for turn in turns:
            if turn.support_ids is not None and turn.support_lengths is not None:
                lengths[start + turn.start : start + turn.end] = turn.support_lengths
                ids.append(turn.support_ids)
    return (np.concatenate(ids), np.concatenate([[0], np.cumsum(lengths)])) if ids else (None, None)


def routed_valid_of(samples: Samples) -> Mask:
    """For each token, whether its routed row was received."""
    offsets = samples.offsets()
    valid = np.zeros(offsets[-1], np.uint8)
    for chunk in samples.chunks():
        first = offsets[chunk.sample] + chunk.first
        valid[first : first + chunk.rows] = 1
    return valid


def _turn_table(turns: Sequence[TurnDelta], offsets: Offsets) -> TurnTable:
    sample = np.array([turn.sample for turn in turns], np.int32)
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
        temperature=np.array([turn.temperature for turn in turns], np.float32),
        **numbers,
        words=words,
    )


def _span_columns(turns: Sequence[TurnDelta], offsets: Offsets) -> dict[str, Array]:
    spans = [(index, turn, span) for index, turn in enumerate(turns) for span in turn.version_spans]
    return {
        "span_turn": np.array([index for index, _, _ in spans], np.int32),
        "span_start": np.array([offsets[turn.sample] + turn.start + span.start for _, turn, span in spans], np.int64),
        "span_version": np.array([span.version for _, _, span in spans], np.int32),
    }

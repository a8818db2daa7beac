"""A plan's samples and micro-batches as arrays, read from the rollouts' `columns` files.

Every format is written from an Assembly. Memory holds OPEN_ROLLOUTS open rollouts and one
micro-batch.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from headpond.batches.credit import Values, read_credit, read_step_credit
from headpond.batches.manifest import (
    AGENT_CHARACTERS,
    AGENTS_BYTES,
    PADDING,
    RECORDED,
    TOKEN_FIELD,
    TRUNCATIONS,
    UNRECORDED,
    WHOLE,
    Array,
    token_columns,
)
from headpond.batches.plan import BatchPlan, BatchRollout, Normalise, pack, positions, segments
from headpond.errors import StageError
from headpond.fields import Per, TrainerField
from headpond.store import Store
from headpond.store.columns import Columns, read_columns

OPEN_ROLLOUTS = 16  # memory maps kept for the next sample of the same rollout; most rollouts have one sample


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample of the plan, cut and masked by its rules."""

    rollout: BatchRollout
    tokens: dict[str, Array]  # batch column -> values, all but position_ids
    row: dict[str, int | float]  # per-sample column -> value

    @property
    def length(self) -> int:
        return self.tokens["input_ids"].size


@dataclass(frozen=True, kw_only=True)
class AssembledMicroBatch:
    tokens: dict[str, Array]
    cu_seqlens: Array
    samples: list[Sample]


class Assembly:
    def __init__(self, store: Store, plan: BatchPlan) -> None:
        self.store, self.plan = store, plan
        self.packing = pack(plan.lengths, plan.rules)
        counts = [len(rollout.sample_lengths) for rollout in plan.rollouts]
        self._first_sample = np.cumsum([0, *counts])
        self._rollout_of = np.repeat(np.arange(len(counts)), counts)
        self._group_index = {group: index for index, group in enumerate(plan.groups)}
        self._env_index = {env: index for index, env in enumerate(plan.envs)}
        self._normalise = Normalise.parse(plan.normalise)
        self._field_padding = {TOKEN_FIELD + field.name: field.filling for field in plan.fields if field.per == "token"}
        self._columns = lru_cache(maxsize=OPEN_ROLLOUTS)(self._open)
        self._credit = lru_cache(maxsize=OPEN_ROLLOUTS)(self._read_credit)
        self._agents: dict[str, int] = {}
        self._agents_bytes = 2

    def sample(self, number: int) -> Sample:
        """The sample at index `number` of `plan.lengths`."""
        index = int(self._rollout_of[number])
        rollout, sample_index = self.plan.rollouts[index], number - int(self._first_sample[index])
        columns, counts = self._columns(index)
        loss_tokens, rollout_loss_tokens = int(counts[sample_index]), int(counts.sum())
        start, length = columns.sample(sample_index).start, int(self.packing.lengths[number])
        span = slice(start, start + length)
        loss_mask = columns.loss_mask[span] * np.uint8(self._trains(index, number))
        weight = self._normalise.weight(loss_tokens=loss_tokens, rollout_loss_tokens=rollout_loss_tokens)
        from_turns, versions = _turn_columns(columns, sample_index, length, self._credit(index))
        tokens = {
            "input_ids": columns.input_ids[span],
            "loss_mask": loss_mask,
            "loss_weights": loss_mask * np.float32(weight),
            "logprobs": columns.logprobs[span],
            **{TOKEN_FIELD + field.name: values[span] for field, values in self._fields(columns, "token")},
        }
        row = {
            "rollout_index": index,
            "group_index": self._group_index[rollout.group],
            "env_index": self._env_index[rollout.env],
            "sample_in_rollout": sample_index,
            "rollout_offset": start,
            "loss_tokens": loss_tokens,
            "rollout_loss_tokens": rollout_loss_tokens,
            "truncated": int(columns.truncated[sample_index] or length < rollout.sample_lengths[sample_index]),
            "reward": rollout.reward,
            "parent": columns.parent_of(sample_index),
            "agent": self._agent(columns.agent_of(sample_index)),
            **{TOKEN_FIELD + field.name: values[sample_index] for field, values in self._fields(columns, "sample")},
        }
        return Sample(rollout=rollout, tokens=tokens | from_turns, row=row | versions)

    def agents(self) -> bytes:
        """The names of the agents of all samples so far, as the rank's file has them."""
        return json.dumps(list(self._agents)).encode().ljust(AGENTS_BYTES)

    def _agent(self, name: str) -> int:
        name = name[:AGENT_CHARACTERS]
        if name not in self._agents:
            needed = self._agents_bytes + len(json.dumps(name)) + 2
            if needed > AGENTS_BYTES:
                return -1
            self._agents_bytes = needed
            self._agents[name] = len(self._agents)
        return self._agents[name]

    def micro_batch(self, numbers: Sequence[int], *, pad_id: int, min_tokens: int = 1) -> AssembledMicroBatch:
        """Assemble one micro-batch of at least `min_tokens` tokens, padding included."""
        samples = [self.sample(number) for number in numbers]
        cu_seqlens = segments(
            [sample.length for sample in samples], self.plan.rules.pad_to_multiple_of, min_tokens=min_tokens
        )
        padding = {**PADDING, "input_ids": pad_id, **self._field_padding}
        tokens = {
            name: np.full(cu_seqlens[-1], padding.get(name, 0), dtype)
            for name, dtype in token_columns(self.plan.fields).items()
        }
        tokens["position_ids"] = positions(cu_seqlens)
        for sample, start in zip(samples, cu_seqlens.tolist(), strict=False):
            for name, values in sample.tokens.items():
                tokens[name][start : start + sample.length] = values
        return AssembledMicroBatch(tokens=tokens, cu_seqlens=cu_seqlens, samples=samples)

    def _trains(self, rollout: int, number: int) -> bool:
        masked = self.plan.rules.oversize == "mask" and self.packing.oversized[number]
        return not (masked or self.plan.rollouts[rollout].masked)

    def _fields(self, columns: Columns, per: Per) -> Iterator[tuple[TrainerField, Array]]:
        """The declared fields with their values in a rollout, or the default if it has none.

        Fields that were declared when it was played, but are not any more, are left out.
        """
        recorded, length = (
            (columns.token_fields, columns.input_ids.size)
            if per == "token"
            else (columns.sample_fields, columns.truncated.size)
        )
        for field in self.plan.fields:
            if field.per != per:
                continue
            values = recorded.get(field.name)
            if values is None:
                if field.default is None and not columns.error:
                    raise StageError(
                        f"rollout {columns.rollout} has no field {field.name!r}, which is required: set "
                        f"{field.setting}.default for rollouts that were played before it was declared"
                    )
                values = np.broadcast_to(field.numpy_dtype.type(field.filling), (length,))
            elif values.dtype != field.numpy_dtype:
                raise StageError(
                    f"rollout {columns.rollout} has {values.dtype} in field {field.name!r}, declared as {field.dtype}: "
                    f"set {field.setting}.dtype to what it was when the rollout was played"
                )
            yield field, values

    @cached_property
    def _step_credit(self) -> dict[str, Values]:
        return read_step_credit(self.store, self.plan.credit) if self.plan.credit else {}

    def _read_credit(self, index: int) -> Values:
        """The advantage of each of a rollout's turns."""
        rollout, turns = self.plan.rollouts[index], self._columns(index)[0].turns.sample.size
        if self.plan.credit:
            values = self._step_credit.get(rollout.rollout, np.empty(0))
        elif rollout.credit:
            values = np.array(read_credit(self.store, rollout.credit).values)
        else:
            return np.full(turns, rollout.advantage)
        if values.size != turns:
            raise StageError(f"rollout {rollout.rollout} has advantages of {values.size} turns, and {turns} turns")
        return values

    def _open(self, index: int) -> tuple[Columns, Array]:
        """The columns of a rollout, and the number of loss tokens of each of its samples."""
        rollout, plan = self.plan.rollouts[index], self.plan
        columns = read_columns(self.store, rollout.columns)
        lengths = tuple(np.diff(columns.sample_offsets).tolist())
        if lengths != rollout.sample_lengths:
            raise StageError(
                f"{rollout.columns.key} has samples of {lengths} tokens, the plan has {rollout.sample_lengths}"
            )
        if columns.logprobs_mode != plan.logprobs_mode:
            raise StageError(
                f"{rollout.columns.key} has {columns.logprobs_mode} logprobs, the plan has {plan.logprobs_mode}"
            )
        loss_tokens = np.zeros(len(lengths), np.int64)
        for sample_index, start in enumerate(columns.sample_offsets[:-1].tolist()):
            number = int(self._first_sample[index]) + sample_index
            if self._trains(index, number):
                loss_tokens[sample_index] = np.count_nonzero(
                    columns.loss_mask[start : start + self.packing.lengths[number]]
                )
        return columns, loss_tokens


def _turn_columns(
    columns: Columns, sample: int, length: int, advantages: Values
) -> tuple[dict[str, Array], dict[str, int | float]]:
    """The columns of a sample's first `length` tokens, and the sample's first and last version.

    A token whose version is a range has the lower one. `advantages` has one entry per turn of the
    rollout.
    """
    turns, span = columns.turns, columns.sample(sample)
    indices = np.flatnonzero(turns.sample == sample)
    # A turn is two runs of tokens: context, which was not sampled, then its completion.
    edges = np.stack([turns.start[indices], turns.end[indices]], axis=1).ravel()
    runs = np.diff(edges, prepend=span.start)
    if not indices.size or edges[-1] != span.stop or (runs < 0).any():
        raise StageError(f"the turns of sample {sample} of rollout {columns.rollout} do not cover its tokens")
    versions = np.stack([np.full(indices.size, -1, np.int32), turns.version_first[indices]], axis=1).ravel()
    exact = np.stack([np.zeros(indices.size, np.uint8), turns.version_exact[indices]], axis=1).ravel()
    by_token = np.repeat(versions, runs)
    for turn, start, version in zip(columns.span_turn, columns.span_start, columns.span_version, strict=True):
        if turns.sample[turn] == sample:  # in order: a later version overwrites the rest of the turn
            by_token[start - span.start : turns.end[turn] - span.start] = version
    tokens = {
        "advantages": np.repeat(np.repeat(advantages[indices].astype(np.float32), 2), runs)[:length],
        "temperatures": np.repeat(np.repeat(turns.temperature[indices], 2), runs)[:length],
        "versions": by_token[:length],
        "version_exact": np.repeat(exact, runs)[:length],
        "sampling": np.repeat(_sampling(columns, indices), runs)[:length],
    }
    row = {"version_first": int(turns.version_first[indices[0]]), "version_last": int(turns.version_last[indices[-1]])}
    return tokens, dict[str, int | float](row)


def _sampling(columns: Columns, turns: Array) -> Array:
    """The way of drawing each turn's tokens: one entry for its context, one for its completion."""
    words = [json.loads(text or "{}") for text in columns.turns.words["sampling"]]
    kinds: list[int] = []
    for turn in turns.tolist():
        altered: dict[str, Any] = words[int(columns.turns.sampling[turn])]
        kind = UNRECORDED if altered else WHOLE
        if altered and altered.keys() <= TRUNCATIONS and _has_support(columns, turn):
            kind = RECORDED
        kinds += [WHOLE, kind]
    return np.array(kinds, np.uint8)


def _has_support(columns: Columns, turn: int) -> bool:
    if columns.support_offsets is None:
        return False
    start, end = (int(edges[turn]) for edges in (columns.turns.start, columns.turns.end))
    return bool((np.diff(columns.support_offsets[start : end + 1]) > 0).all())

"""Random rollouts for tests: their files in a store, and their content as arrays."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headpond.batches import BatchPlan, BatchRollout, EncodedRank, Manifest, seal_manifest
from headpond.batches.plan import PackingRules
from headpond.batches.writer import encode_rank
from headpond.fields import Per, TrainerField
from headpond.store import BlobRef
from headpond.store.columns import Columns, TurnTable, write_columns
from headpond.store.experts import Chunk, seal_experts
from headpond.store.files import FileStore


@dataclass(frozen=True, kw_only=True)
class MadeTurn:
    context: int
    completion: int
    version: int = 3
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True)
class MadeRollout:
    planned: BatchRollout
    columns: Columns
    rows: list[np.ndarray[Any, Any]]
    """routed experts of each sample, of all its tokens"""
    valid: list[np.ndarray[Any, Any]]
    """which rows the engine sent"""


@dataclass(kw_only=True)
class RolloutMaker:
    store: FileStore
    seed: int = 0
    experts: str | None = None
    """dtype of the routed experts; None for rollouts without"""
    fields: Sequence[TrainerField] = ()
    layers: int = 2
    topk: int = 3
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def make(
        self, rollout: str, samples: Sequence[Sequence[MadeTurn]], *, group: str = "g", masked: bool = False
    ) -> MadeRollout:
        columns = self._columns(rollout, samples)
        lengths = np.diff(columns.sample_offsets).tolist()
        rows, valid = self._expert_rows(lengths)
        planned = BatchRollout(
            rollout=rollout,
            group=group,
            env=f"env-{group}",
            reward=float(self.rng.normal()),
            advantage=float(self.rng.normal()),
            version_first=int(columns.turns.version_first.min(initial=0)),
            version_last=int(columns.turns.version_last.max(initial=0)),
            sample_lengths=tuple(lengths),
            columns=write_columns(self.store, f"rollouts/{rollout}/columns", columns),
            experts=self._write_experts(rollout, rows, valid) if self.experts else None,
            masked=masked,
        )
        return MadeRollout(planned=planned, columns=columns, rows=rows, valid=valid)

    def _columns(self, rollout: str, samples: Sequence[Sequence[MadeTurn]]) -> Columns:
        turns = [(sample, turn) for sample, made in enumerate(samples) for turn in made]
        ends = np.cumsum([turn.context + turn.completion for _, turn in turns], dtype=np.int64)
        lengths = [sum(turn.context + turn.completion for turn in made) for made in samples]
        tokens = sum(lengths)
        sampled = np.concatenate([np.zeros(0), *(np.repeat([0, 1], [t.context, t.completion]) for _, t in turns)])
        words = {"finish_reason": ["stop"], "agent": [""], "engine": [""], "sampling": ["{}"]}

        def of_turns(dtype: str, values: Sequence[float]) -> np.ndarray[Any, Any]:
            return np.array(values, dtype).reshape(len(turns))

        return Columns(
            rollout=rollout,
            attempt=1,
            logprobs_mode="processed",
            input_ids=self.rng.integers(2, 150_000, tokens).astype(np.int32),
            loss_mask=(sampled * (self.rng.random(tokens) < 0.9)).astype(np.uint8),
            logprobs=(-sampled * self.rng.random(tokens)).astype(np.float32),
            sample_offsets=np.cumsum([0, *lengths], dtype=np.int64),
            first_prompt_length=np.array([made[0].context for made in samples], np.int32),
            truncated=self.rng.integers(0, 2, len(samples)).astype(np.uint8),
            overlong_prompt=np.zeros(len(samples), np.uint8),
            parent=np.arange(-1, len(samples) - 1, dtype=np.int32),
            agent=np.zeros(len(samples), np.int32),
            turns=TurnTable(
                sample=of_turns("i4", [sample for sample, _ in turns]),
                start=of_turns("i8", [end - turn.completion for end, (_, turn) in zip(ends, turns, strict=True)]),
                end=ends.reshape(len(turns)),
                version_first=of_turns("i4", [turn.version for _, turn in turns]),
                version_last=of_turns("i4", [turn.version + 1 for _, turn in turns]),
                version_exact=of_turns("u1", [turn.version % 2 for _, turn in turns]),
                temperature=of_turns("f4", [turn.temperature for _, turn in turns]),
                reward=of_turns("f8", [np.nan for _ in turns]),
                **{name: of_turns("i4", [0] * len(turns)) for name in words},
                words=words,
            ),
            metrics={"turns": float(len(turns))},
            token_fields=self._fields("token", tokens),
            sample_fields=self._fields("sample", len(samples)),
            conversation=np.frombuffer(json.dumps([{"content": rollout}], indent=1).encode(), np.uint8),
        )

    def _fields(self, per: Per, length: int) -> dict[str, np.ndarray[Any, Any]]:
        return {
            each.name: (100 * self.rng.random(length)).astype(each.numpy_dtype)
            for each in self.fields
            if each.per == per
        }

    def _expert_rows(self, lengths: list[int]) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
        """Rows of every token, and which were sent: all but the last, which is never fed forward, and 5 % at random."""
        high = 1000 if self.experts == "uint16" else 256
        shapes = [(length, self.layers, self.topk) for length in lengths]
        rows = [self.rng.integers(1, high, shape).astype(self.experts or "uint8") for shape in shapes]
        valid = [(np.arange(n) < n - 1) & (self.rng.random(n) < 0.95) for n in lengths]
        return rows, valid

    def _write_experts(
        self, rollout: str, rows: list[np.ndarray[Any, Any]], valid: list[np.ndarray[Any, Any]]
    ) -> BlobRef:
        key = f"rollouts/{rollout}/experts"
        part, chunks = self.store.part(key, reserve_head=True), list[Chunk]()
        for sample, sent in enumerate(valid):
            positions = np.flatnonzero(sent)
            for run in np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1) if positions.size else []:
                part.append(rows[sample][run])
                chunks.append(Chunk(sample=sample, first=int(run[0]), rows=run.size))
        return seal_experts(
            self.store,
            key,
            part,
            chunks=chunks,
            routed_valid=np.concatenate([np.zeros(0, np.uint8), *valid]).astype(np.uint8),
            row=(self.layers, self.topk),
            dtype=np.dtype(self.experts or "uint8"),
            rollout=rollout,
            attempt=1,
        )


DRAWN_WITH = ["{}", '{"top_k":4,"top_p":0.9}', '{"presence_penalty":1.0,"top_k":4}']


def drawn(store: FileStore, name: str, *, masks: bool) -> MadeRollout:
    """A rollout of three turns: plain, truncated, and truncated with a penalty."""
    made = RolloutMaker(store=store).make(name, [[MadeTurn(context=2, completion=3)] * 3])
    columns, lengths = made.columns, np.zeros(15, np.int64)
    turns = replace(
        columns.turns, sampling=np.array([0, 1, 2], np.int32), words={**columns.turns.words, "sampling": DRAWN_WITH}
    )
    columns = replace(columns, turns=turns)
    if masks:
        lengths[7:10], lengths[12:15] = [2, 1, 3], 1
        ids = np.arange(100, 100 + lengths.sum(), dtype=np.int32)
        columns = replace(columns, support_ids=ids, support_offsets=np.concatenate([[0], np.cumsum(lengths)]))
    ref = write_columns(store, f"rollouts/{name}/drawn", columns)
    return replace(made, columns=columns, planned=replace(made.planned, columns=ref))


def plan_of(made: Sequence[MadeRollout], *, step: int = 0, data_ranks: int = 1, **changes: Any) -> BatchPlan:
    rules = PackingRules(data_ranks=data_ranks, seq_len=64, pad_to_multiple_of=8)
    rollouts = tuple(each.planned for each in made)
    return BatchPlan(**{"step": step, "rules": rules, "rollouts": rollouts, **changes})


def encode_all(store: FileStore, plan: BatchPlan, *, execution: str = "x") -> list[EncodedRank]:
    return [
        encode_rank(store, plan, data_rank=rank, execution=execution, rollouts_jsonl=True)
        for rank in range(plan.rules.data_ranks)
    ]


def seal(store: FileStore, plan: BatchPlan) -> Manifest:
    return seal_manifest(store, plan, encode_all(store, plan))

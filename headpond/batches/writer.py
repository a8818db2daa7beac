"""Encoding: one rank of a plan into one file of the store, in the plan's format. Imported by encode workers only."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from headpond.batches import prime_rl
from headpond.batches.assembly import Assembly
from headpond.batches.manifest import (
    AGENTS,
    AGENTS_BYTES,
    OFFSETS,
    SAMPLE,
    Array,
    EncodedRank,
    rank_metadata,
    sample_columns,
    token_columns,
)
from headpond.batches.plan import BatchPlan, BatchRollout, segments
from headpond.store import BlobRef, Store, tensors
from headpond.store.atomic import UnfinishedFile, writing
from headpond.store.columns import read_columns
from headpond.store.parts import checksum, mapped, write_at

Layout = Mapping[str, tuple[np.dtype[Any], int]]  # array -> dtype and length


def encode_rank(
    store: Store, plan: BatchPlan, *, data_rank: int, execution: str, rollouts_jsonl: bool = False
) -> EncodedRank:
    """Encode one rank. The names of its files contain `execution`, so no execution overwrites the
    files of another."""
    assembly = Assembly(store, plan)
    stem = f"{plan.directory}/rank_{data_rank:02d}.{execution}"
    numbers = [number for batch in assembly.packing.ranks[data_rank] for number in batch]
    logprob_sum: float | None = None
    if plan.format == "native":
        file, loss_tokens, logprob_sum = write_rank(assembly, data_rank, f"{stem}.safetensors")
    else:
        file, loss_tokens = prime_rl.write_rank(assembly, data_rank, f"{stem}.bin")
    writes_jsonl = rollouts_jsonl and data_rank == 0
    lines = (line for rollout in plan.rollouts for line in _line(store, plan, rollout))
    jsonl = store.put(f"{plan.directory}/rollouts.{execution}.jsonl", lines) if writes_jsonl else None
    # The process that wrote them syncs them: on a network file system no other process can.
    store.sync([ref.key for ref in (file, jsonl) if ref])
    return EncodedRank(
        plan=plan.digest,
        data_rank=data_rank,
        file=file,
        rollouts_jsonl=jsonl,
        micro_batches=len(assembly.packing.ranks[data_rank]),
        tokens=int(assembly.packing.lengths[numbers].sum()),
        samples=len(numbers),
        loss_tokens=loss_tokens,
        logprob_sum=logprob_sum,
    )


def write_rank(assembly: Assembly, data_rank: int, key: str) -> tuple[BlobRef, int, float]:
    """Write a rank in the native format. Returns the file, and the number and logprob sum of its
    tokens in the loss."""
    plan, batches = assembly.plan, assembly.packing.ranks[data_rank]
    tables = _micro_batch_tables(assembly, batches)
    tokens, rows = int(tables["token_offsets"][-1]), int(tables["sample_offsets"][-1])
    samples = {SAMPLE + name: np.zeros(rows, dtype) for name, dtype in sample_columns(plan.fields).items()}
    small = {**tables, **samples, AGENTS: np.zeros(AGENTS_BYTES, np.uint8)}
    layout = {name: (dtype, tokens) for name, dtype in token_columns(plan.fields).items()}
    layout |= {name: (array.dtype, array.size) for name, array in small.items()}
    file = _ColumnFile(assembly.store, key, layout, rank_metadata(plan.step, data_rank))
    logprob_sum = 0.0
    try:
        for number, batch in enumerate(batches):
            assembled = assembly.micro_batch(batch, pad_id=plan.pad_id)
            for name, values in assembled.tokens.items():
                file.write(name, values, first=int(tables["token_offsets"][number]))
            trained = assembled.tokens["loss_mask"].astype(bool)
            logprob_sum += float(assembled.tokens["logprobs"].sum(dtype=np.float64, where=trained))
            for row, sample in enumerate(assembled.samples, int(tables["sample_offsets"][number])):
                for name, value in sample.row.items():
                    samples[SAMPLE + name][row] = value
        small[AGENTS] = np.frombuffer(assembly.agents(), np.uint8)
        for name, values in small.items():
            file.write(name, values)
        return file.commit(), int(samples[SAMPLE + "loss_tokens"].sum()), logprob_sum
    except BaseException:
        file.discard()
        raise


def _micro_batch_tables(assembly: Assembly, batches: list[list[int]]) -> dict[str, Array]:
    lengths, multiple = assembly.packing.lengths, assembly.plan.rules.pad_to_multiple_of
    cu_seqlens = [segments(lengths[batch], multiple) for batch in batches]
    sizes = [
        [int(bounds[-1]) for bounds in cu_seqlens],
        [len(batch) for batch in batches],
        [bounds.size for bounds in cu_seqlens],
    ]
    return {
        **{name: np.cumsum([0, *size], dtype=np.int64) for name, size in zip(OFFSETS, sizes, strict=True)},
        "cu_seqlens": np.concatenate([np.zeros(0, np.int32), *cu_seqlens]),
        "max_seqlen": np.array([np.diff(bounds).max() for bounds in cu_seqlens], np.int32),
    }


class _ColumnFile(UnfinishedFile):
    """A safetensors file whose arrays are written in pieces, in any order."""

    def __init__(self, store: Store, key: str, layout: Layout, metadata: Mapping[str, str]) -> None:
        super().__init__(store.part_path(key))
        # Wide dtypes first, so that every array is aligned.
        ordered = sorted(layout.items(), key=lambda item: (-item[1][0].itemsize, item[0]))
        self._head = tensors.header({name: (dtype, (length,)) for name, (dtype, length) in ordered}, metadata)
        self._store, self._key = store, key
        self._starts: dict[str, int] = {}
        self._size = len(self._head)
        for name, (dtype, length) in ordered:
            self._starts[name] = self._size
            self._size += length * dtype.itemsize
        self.create()
        with writing(self.path):
            self._file = self.path.open("rb+", buffering=0)

    def write(self, name: str, values: Array, *, first: int = 0) -> None:
        """Write `values` into the array `name`, from its element `first` on."""
        self._write(values, self._starts[name] + first * values.itemsize)

    def commit(self) -> BlobRef:
        self._write(np.frombuffer(self._head, np.uint8), 0)
        with writing(self.path), self._file:
            self._file.truncate(self._size)
            digest = checksum(mapped(self._file.fileno()))
        self._store.publish(self.path, self._key)
        return BlobRef(key=self._key, size=self._size, checksum=digest)

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # the bytes are thrown away
            self._file.close()
        super().discard()

    def _write(self, content: Array, offset: int) -> None:
        with writing(self.path):
            write_at(self._file.fileno(), [content.view(np.uint8).data], offset)


def _line(store: Store, plan: BatchPlan, rollout: BatchRollout) -> Iterator[bytes]:
    columns = read_columns(store, rollout.columns)
    fields = {
        "step": plan.step,
        "rollout": rollout.rollout,
        "group": rollout.group,
        "env": rollout.env,
        "reward": rollout.reward,
        "advantage": rollout.advantage,
        "masked": rollout.masked,
        "versions": [rollout.version_first, rollout.version_last],
        "inexact_tokens": rollout.inexact_tokens,
        "sample_lengths": rollout.sample_lengths,
        "truncated": bool(columns.truncated.any()),
        "error": columns.error or None,
        "metrics": dict(columns.metrics),
        "fields": {name: values.tolist() for name, values in columns.sample_fields.items()},
    }
    head = json.dumps(fields, separators=(",", ":"), ensure_ascii=False, allow_nan=False)[:-1]
    # The conversation is JSON already: copied, not parsed. Line breaks in JSON are whitespace between tokens.
    conversation = columns.conversation.tobytes().replace(b"\n", b" ") or b"null"
    yield head.encode() + b',"conversation":' + conversation + b"}\n"

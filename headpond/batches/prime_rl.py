"""prime-rl's batch formats, byte for byte as its own encoder writes them. A trainer imports none of
this.

A file has the micro-batches of a rank. Either all samples and fillers have routed experts, with
zeros where the engine sent no row, or none has. Memory holds one micro-batch, one of its columns as
Python objects, and ROWS_PER_PIECE rows of experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from headpond.batches.assembly import AssembledMicroBatch, Assembly, Sample
from headpond.batches.manifest import TOKEN_FIELD, Array
from headpond.errors import StageError
from headpond.store import BlobRef
from headpond.store.experts import Experts
from headpond.store.parts import Piece

PAD_ID = 1
LEAST_TOKENS = 2  # in a micro-batch: prime-rl's trainer squeezes a single one away
ROWS_PER_PIECE = 4096  # rows of routed experts read and written at once: 1.5 MB at 48 layers and top-8
DTYPE_NAMES = {"uint8": "uint8", "uint16": "int16"}  # prime-rl has no uint16; no model has 32,768 experts
BINARY_MARKERS = {1: 0xC4, 2: 0xC5, 4: 0xC6}  # MessagePack: bytes of a binary value's length -> its type

encode = msgspec.msgpack.encode
# layers and top-k of the routed experts, and their dtype
RowKind = tuple[tuple[int, int], np.dtype[Any]]


@dataclass(frozen=True, kw_only=True)
class ExpertRows:
    """Routed experts of consecutive tokens, read while they are written."""

    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    rows: Iterator[Array]


def write_rank(assembly: Assembly, data_rank: int, key: str) -> tuple[BlobRef, int]:
    """Write a rank as micro-batches. Returns the file and the number of its tokens that are in the
    loss."""
    loss_tokens, kind = 0, _expert_kind(assembly)

    def pieces() -> Iterator[Piece]:
        nonlocal loss_tokens
        batches = assembly.packing.ranks[data_rank]
        yield array_header(len(batches))
        for batch in batches:
            assembled = assembly.micro_batch(batch, pad_id=PAD_ID, min_tokens=LEAST_TOKENS)
            for sample, start in zip(assembled.samples, assembled.cu_seqlens.tolist(), strict=False):
                if kind and not sample.rollout.experts:
                    assembled.tokens["loss_mask"][start : start + sample.length] = 0
            loss_tokens += int(np.count_nonzero(assembled.tokens["loss_mask"]))
            yield from _micro_batch_pieces(assembly, assembled, kind)

    return assembly.store.put(key, pieces()), loss_tokens


def encode_micro_batch(
    tokens: Mapping[str, Array], *, lengths: Array, envs: Sequence[tuple[str, int]], experts: ExpertRows | None
) -> Iterator[Piece]:
    """Encode one micro-batch. `lengths` are those of the sequences, padding counted into the last;
    `envs` are names with their numbers of tokens."""
    yield array_header(16)
    for name in ("input_ids", "loss_mask", "advantages", "logprobs", "position_ids"):
        column = tokens[name].astype(bool) if name == "loss_mask" else tokens[name]
        yield encode(column.tolist())
    yield encode(lengths.tolist())
    yield encode(tokens["temperatures"].tolist())
    yield encode([name for name, count in envs for _ in range(count)])
    yield encode(lengths.tolist())
    yield _field(tokens, "ref_logprobs")
    yield from _encode_experts(experts)
    yield encode(None) * 2  # mm_kwargs, mm_token_type_ids
    for name in ("rl_weights", "ce_weights", "ref_kl_weights"):
        yield _field(tokens, name)


def _field(tokens: Mapping[str, Array], name: str) -> bytes:
    """A field's values; None if `[batch.fields]` does not declare it."""
    values = tokens.get(TOKEN_FIELD + name)
    return encode(None if values is None else values.tolist())


def array_header(length: int) -> bytes:
    """The beginning of a MessagePack array whose elements are written separately."""
    return encode([msgspec.Raw()] * length)


def binary_header(length: int) -> bytes:
    """The beginning of a MessagePack binary value whose bytes are written separately."""
    for width, marker in BINARY_MARKERS.items():
        if length < 1 << 8 * width:
            return bytes([marker]) + length.to_bytes(width, "big")
    raise StageError(
        f"the routed experts of one micro-batch have {length} bytes, and MessagePack holds 4 GiB in one value: "
        "lower batch.seq_len"
    )


def _encode_experts(experts: ExpertRows | None) -> Iterator[Piece]:
    if experts is None:
        yield encode(None)
        return
    yield array_header(3) + binary_header(int(np.prod(experts.shape)) * experts.dtype.itemsize)
    yield from experts.rows
    yield encode(experts.shape) + encode(DTYPE_NAMES[experts.dtype.name])


def _micro_batch_pieces(assembly: Assembly, batch: AssembledMicroBatch, kind: RowKind | None) -> Iterator[Piece]:
    size, lengths = int(batch.cu_seqlens[-1]), [sample.length for sample in batch.samples]
    padding = size - sum(lengths)
    padded = [*lengths[:-1], lengths[-1] + padding] if lengths else [padding]
    for name, values in batch.tokens.items():
        if name.startswith(TOKEN_FIELD):
            values[size - padding :] = 0  # prime-rl pads with 0: its cross-entropy ignores the loss mask
    return encode_micro_batch(
        batch.tokens,
        lengths=np.array(padded),
        envs=[*((sample.rollout.env, sample.length) for sample in batch.samples), ("", padding)],
        experts=_expert_rows(assembly, batch.samples, size, kind),
    )


def _expert_kind(assembly: Assembly) -> RowKind | None:
    """The form of the step's routed experts, the same for every rank; None if no rollout has any.

    prime-rl replays the routes of all tokens or of none. So a sample without any is written with
    zeros and leaves the loss.
    """
    for rollout in assembly.plan.rollouts:
        if rollout.experts:
            rows = Experts(assembly.store, rollout.experts).rows
            return (int(rows.shape[1]), int(rows.shape[2])), rows.dtype
    return None


def _expert_rows(assembly: Assembly, samples: list[Sample], size: int, kind: RowKind | None) -> ExpertRows | None:
    if kind is None:
        return None
    opened = [Experts(assembly.store, sample.rollout.experts) if sample.rollout.experts else None for sample in samples]
    (layers, topk), dtype = kind
    for experts in filter(None, opened):
        if (experts.rows.shape[1:], experts.rows.dtype) != ((layers, topk), dtype):
            raise StageError(
                f"routed experts of one step have shapes {experts.rows.shape[1:]} and {layers, topk}; were the models "
                "the same?"
            )

    def rows() -> Iterator[Array]:
        for sample, experts in zip(samples, opened, strict=True):
            yield from _row_pieces(experts, int(sample.row["sample_in_rollout"]), sample.length, (layers, topk), dtype)
        yield from _row_pieces(None, 0, size - sum(sample.length for sample in samples), (layers, topk), dtype)

    return ExpertRows(shape=(size, layers, topk), dtype=dtype, rows=rows())


def _row_pieces(
    experts: Experts | None, sample: int, length: int, row: tuple[int, int], dtype: np.dtype[Any]
) -> Iterator[Array]:
    for start in range(0, length, ROWS_PER_PIECE):
        stop = min(length, start + ROWS_PER_PIECE)
        piece = np.zeros((stop - start, *row), dtype)
        if experts:
            experts.read(sample, start, stop, piece, missing=0)
        yield piece

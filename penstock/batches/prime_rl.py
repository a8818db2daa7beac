"""prime-rl's two batch formats, byte for byte as its own encoder writes them. A trainer imports none of this.

`prime-rl` is the format of 2026-08 (559b447), one file of micro-batches per rank; `prime-rl-2026-05` that of 8e97806,
one file of samples per step. Both contain the routed experts, with zeros where the engine sent no row. Memory holds one
micro-batch or sample, one of its columns as Python objects, and ROWS_PER_PIECE rows of experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.batches.assembly import AssembledMicroBatch, Assembly, Sample
from penstock.batches.batch_columns import TOKEN_FIELD, Array
from penstock.batches.manifest import Manifest
from penstock.errors import StageError
from penstock.store import BlobRef, Store
from penstock.store.atomic import replacing, writing
from penstock.store.experts import Experts
from penstock.store.parts import Piece

PAD_ID = 1
ROWS_PER_PIECE = 4096  # of routed experts, read and written at once: 1.5 MB at 48 layers and top-8
DTYPE_NAMES = {"uint8": "uint8", "uint16": "int16"}  # prime-rl has no uint16; no model has 32,768 experts
BINARY_MARKERS = {1: 0xC4, 2: 0xC5, 4: 0xC6}  # MessagePack: bytes of a binary value's length -> its type

encode = msgspec.msgpack.encode


@dataclass(frozen=True, kw_only=True)
class ExpertRows:
    """Routed experts of consecutive tokens, read while they are written."""

    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    rows: Iterator[Array]


def write_rank(assembly: Assembly, data_rank: int, key: str) -> tuple[BlobRef, int]:
    """Write a rank in the format of 2026-08; returns the file and the number of its tokens that are in the loss."""
    loss_tokens = 0

    def pieces() -> Iterator[Piece]:
        nonlocal loss_tokens
        batches = assembly.packing.ranks[data_rank]
        yield array_header(len(batches))
        for batch in batches:
            assembled = assembly.micro_batch(batch, pad_id=PAD_ID)
            loss_tokens += sum(int(sample.row["loss_tokens"]) for sample in assembled.samples)
            yield from _micro_batch_pieces(assembly, assembled)

    return assembly.store.put(key, pieces()), loss_tokens


def write_step(assembly: Assembly, key: str) -> tuple[BlobRef, int]:
    """Write a step in the format of 2026-05; returns the file and the number of its tokens that are in the loss."""
    loss_tokens = 0

    def pieces() -> Iterator[Piece]:
        nonlocal loss_tokens
        numbers = np.flatnonzero(assembly.packing.lengths)
        yield array_header(3) + array_header(numbers.size)
        for number in numbers.tolist():
            sample = assembly.sample(number)
            loss_tokens += int(sample.row["loss_tokens"])
            yield from encode_sample(
                sample.tokens,
                prompt_length=sample.prompt_length,
                env=sample.rollout.env,
                advantage=sample.rollout.advantage,
                reward=sample.rollout.reward,
                experts=_expert_rows(assembly, [sample], sample.length),
            )
        yield encode(assembly.plan.step) + encode(None)

    return assembly.store.put(key, pieces()), loss_tokens


def encode_micro_batch(
    tokens: Mapping[str, Array], *, lengths: Array, envs: Sequence[tuple[str, int]], experts: ExpertRows | None
) -> Iterator[Piece]:
    """`lengths` of the sequences, padding counted into the last; `envs` as names with their numbers of tokens."""
    yield array_header(16)
    yield encode(tokens["input_ids"].tolist())
    yield encode(tokens["loss_mask"].astype(bool).tolist())
    yield encode(tokens["advantages"].tolist())
    yield encode(tokens["logprobs"].tolist())
    yield encode(tokens["position_ids"].tolist())
    yield encode(lengths.tolist())
    yield encode(tokens["temperatures"].tolist())
    yield encode([name for name, count in envs for _ in range(count)])
    yield encode(lengths.tolist())
    yield _field(tokens, "ref_logprobs")
    yield from _encode_experts(experts)
    yield encode(None) * 2  # mm_kwargs, mm_token_type_ids
    for name in ("rl_weights", "ce_weights", "ref_kl_weights"):
        yield _field(tokens, name)


def encode_sample(
    tokens: Mapping[str, Array],
    *,
    prompt_length: int,
    env: str,
    advantage: float,
    reward: float,
    experts: ExpertRows | None,
) -> Iterator[Piece]:
    ids, mask = tokens["input_ids"], tokens["loss_mask"].astype(bool)
    yield array_header(14)
    yield encode(ids[:prompt_length].tolist())
    yield encode(mask[:prompt_length].tolist())
    yield encode(ids[prompt_length:].tolist())
    yield encode(mask[prompt_length:].tolist())
    yield encode(tokens["logprobs"][prompt_length:].tolist())
    yield encode(tokens["temperatures"][prompt_length:].tolist())
    yield encode(env)
    yield _field(tokens, "ref_logprobs")  # teacher_logprobs, of the prompt too
    yield encode(float(advantage)) + encode(float(reward))
    yield encode(None)  # mm_kwargs
    yield from _encode_experts(experts)
    yield encode(None) + encode("rl")  # mm_token_type_ids, training_mode


def _field(tokens: Mapping[str, Array], name: str) -> bytes:
    """None if `[batch.fields]` does not declare it."""
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


def _micro_batch_pieces(assembly: Assembly, batch: AssembledMicroBatch) -> Iterator[Piece]:
    size, lengths = int(batch.cu_seqlens[-1]), [sample.length for sample in batch.samples]
    padding = size - sum(lengths)
    padded = [*lengths[:-1], lengths[-1] + padding] if lengths else [padding]
    for name, values in batch.tokens.items():
        if name.startswith(TOKEN_FIELD):
            values[size - padding :] = 0  # as prime-rl pads: its cross-entropy ignores the loss mask
    return encode_micro_batch(
        batch.tokens,
        lengths=np.array(padded),
        envs=[*((sample.rollout.env, sample.length) for sample in batch.samples), ("", padding)],
        experts=_expert_rows(assembly, batch.samples, size),
    )


def _expert_rows(assembly: Assembly, samples: list[Sample], size: int) -> ExpertRows | None:
    """None if no sample has routed experts."""
    opened = [Experts(assembly.store, sample.rollout.experts) if sample.rollout.experts else None for sample in samples]
    kinds = {(experts.rows.shape[1:], experts.rows.dtype) for experts in opened if experts}
    if not kinds:
        return None
    if len(kinds) > 1:
        raise StageError(f"routed experts of one micro-batch have different shapes: {kinds}; were the models the same?")
    (layers, topk), dtype = kinds.pop()

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


def publish_prime_rl(store: Store, manifest: Manifest, output_dir: Path) -> None:
    """Put the step's files into `output_dir/rollouts/step_N`, where prime-rl reads them."""
    directory = output_dir / "rollouts" / f"step_{manifest.plan.step}"
    one_file = manifest.plan.format == "prime-rl-2026-05"
    for rank in manifest.ranks:
        if rank.rollouts_jsonl:
            _publish(store, rank.rollouts_jsonl, directory / "train_rollouts.jsonl")
        _publish(store, rank.file, directory / ("train_rollouts.bin" if one_file else f"rank_{rank.data_rank}.bin"))


def _publish(store: Store, ref: BlobRef, target: Path) -> None:
    store.require(ref)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, suffix="tmp") as temporary:
            store.export(ref.key, temporary)

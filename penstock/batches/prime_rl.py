"""prime-rl's two batch files, as its own encoder writes them, with one micro-batch or sample in memory at a time.

`prime-rl` is its form of 2026-08 (559b447), one file of micro-batches a rank; `prime-rl-2026-05` that of 8e97806, one
file of samples a step. Both carry the routed experts in the file, with zeros where nobody sent a row.
"""

import errno
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.batches import msgpack
from penstock.batches.assembly import AssembledMicroBatch, Assembly, Sample
from penstock.batches.batch_columns import Array
from penstock.batches.manifest import Manifest
from penstock.errors import StageError
from penstock.store import BlobRef, Store
from penstock.store.experts import Experts
from penstock.store.parts import Piece, writing

PAD_ID = 1
ROWS_PER_PIECE = 4096  # of routed experts, read and written at once: 1.5 MB at 48 layers and top-8
DTYPE_NAMES = {"uint8": "uint8", "uint16": "int16"}  # prime-rl knows no uint16; no model has 32,768 experts


@dataclass(frozen=True, kw_only=True)
class Routes:
    """Routed experts of a run of tokens, read when they are written."""

    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    rows: Iterator[Array]


def write_rank(assembly: Assembly, data_rank: int, key: str) -> tuple[BlobRef, int]:
    """The file of one rank in the form of 2026-08, and how many of its tokens are in the loss."""
    loss_tokens = 0

    def pieces() -> Iterator[Piece]:
        nonlocal loss_tokens
        batches = assembly.packing.ranks[data_rank]
        yield msgpack.array_header(len(batches))
        for batch in batches:
            assembled = assembly.micro_batch(batch, pad_id=PAD_ID)
            loss_tokens += sum(int(sample.row["loss_tokens"]) for sample in assembled.samples)
            yield from _assembled(assembly, assembled)

    return assembly.store.put(key, pieces()), loss_tokens


def write_step(assembly: Assembly, key: str) -> tuple[BlobRef, int]:
    """The file of a whole step in the form of 2026-05, and how many of its tokens are in the loss."""
    loss_tokens = 0

    def pieces() -> Iterator[Piece]:
        nonlocal loss_tokens
        numbers = np.flatnonzero(assembly.packing.lengths)
        yield msgpack.array_header(3) + msgpack.array_header(numbers.size)
        for number in numbers.tolist():
            sample = assembly.sample(number)
            loss_tokens += int(sample.row["loss_tokens"])
            yield from encode_sample(
                sample.tokens,
                prompt_length=sample.prompt_length,
                env=sample.rollout.env,
                advantage=sample.rollout.advantage,
                reward=sample.rollout.reward,
                routes=_routes(assembly, [sample], sample.length),
            )
        yield msgpack.integer(assembly.plan.step) + msgpack.NIL

    return assembly.store.put(key, pieces()), loss_tokens


def encode_micro_batch(
    tokens: Mapping[str, Array], *, lengths: Array, envs: Sequence[tuple[str, int]], routes: Routes | None
) -> Iterator[Piece]:
    """`lengths` of the sequences, padding counted into the last; `envs` as names with their numbers of tokens."""
    names = b"".join(msgpack.string(name) * count for name, count in envs)
    before_routes = [
        msgpack.array_header(16),
        msgpack.integers(tokens["input_ids"]),
        msgpack.booleans(tokens["loss_mask"]),
        msgpack.floats(tokens["advantages"]),
        msgpack.floats(tokens["logprobs"]),
        msgpack.integers(tokens["position_ids"]),
        msgpack.integers(lengths),
        msgpack.floats(tokens["temperatures"]),
        msgpack.array_header(tokens["input_ids"].size) + names,
        msgpack.integers(lengths),
        msgpack.NIL,  # ref_logprobs
    ]
    yield b"".join(before_routes)
    yield from _encode_routes(routes)
    yield msgpack.NIL * 5  # mm_kwargs, mm_token_type_ids, rl_weights, ce_weights, ref_kl_weights


def encode_sample(
    tokens: Mapping[str, Array], *, prompt_length: int, env: str, advantage: float, reward: float, routes: Routes | None
) -> Iterator[Piece]:
    prompt, completion = slice(prompt_length), slice(prompt_length, None)
    before_routes = [
        msgpack.array_header(14),
        msgpack.integers(tokens["input_ids"][prompt]),
        msgpack.booleans(tokens["loss_mask"][prompt]),
        msgpack.integers(tokens["input_ids"][completion]),
        msgpack.booleans(tokens["loss_mask"][completion]),
        msgpack.floats(tokens["logprobs"][completion]),
        msgpack.floats(tokens["temperatures"][completion]),
        msgpack.string(env),
        msgpack.NIL,  # teacher_logprobs
        msgpack.floating(advantage),
        msgpack.floating(reward),
        msgpack.NIL,  # mm_kwargs
    ]
    yield b"".join(before_routes)
    yield from _encode_routes(routes)
    yield msgpack.NIL + msgpack.string("rl")  # mm_token_type_ids, training_mode


def _encode_routes(routes: Routes | None) -> Iterator[Piece]:
    if routes is None:
        yield msgpack.NIL
        return
    yield msgpack.array_header(3) + msgpack.binary_header(int(np.prod(routes.shape)) * routes.dtype.itemsize)
    yield from routes.rows
    yield msgpack.integers(np.array(routes.shape)) + msgpack.string(DTYPE_NAMES[routes.dtype.name])


def _assembled(assembly: Assembly, batch: AssembledMicroBatch) -> Iterator[Piece]:
    size, lengths = int(batch.cu_seqlens[-1]), [sample.length for sample in batch.samples]
    padding = size - sum(lengths)
    padded = [*lengths[:-1], lengths[-1] + padding] if lengths else [padding]
    return encode_micro_batch(
        batch.tokens,
        lengths=np.array(padded),
        envs=[*((sample.rollout.env, sample.length) for sample in batch.samples), ("", padding)],
        routes=_routes(assembly, batch.samples, size),
    )


def _routes(assembly: Assembly, samples: list[Sample], size: int) -> Routes | None:
    """None when no sample has any."""
    opened = [Experts(assembly.store, sample.rollout.experts) if sample.rollout.experts else None for sample in samples]
    kinds = {(experts.rows.shape[1:], experts.rows.dtype) for experts in opened if experts}
    if not kinds:
        return None
    if len(kinds) > 1:
        raise StageError(f"routed experts of one micro-batch have different shapes: {kinds}; were the models the same?")
    (layers, topk), dtype = kinds.pop()

    def rows() -> Iterator[Array]:
        for sample, experts in zip(samples, opened, strict=True):
            yield from _pieces(experts, int(sample.row["sample_in_rollout"]), sample.length, (layers, topk), dtype)
        yield from _pieces(None, 0, size - sum(sample.length for sample in samples), (layers, topk), dtype)

    return Routes(shape=(size, layers, topk), dtype=dtype, rows=rows())


def _pieces(
    experts: Experts | None, sample: int, length: int, row: tuple[int, int], dtype: np.dtype[Any]
) -> Iterator[Array]:
    for start in range(0, length, ROWS_PER_PIECE):
        stop = min(length, start + ROWS_PER_PIECE)
        piece = np.zeros((stop - start, *row), dtype)
        if experts:
            experts.read(sample, start, stop, piece, missing=0)
        yield piece


def publish_prime_rl(store: Store, manifest: Manifest, output_dir: Path) -> None:
    """Puts the step under `output_dir/rollouts/step_N`, prime-rl's output directory."""
    directory = output_dir / "rollouts" / f"step_{manifest.plan.step}"
    one_file = manifest.plan.format == "prime-rl-2026-05"
    for rank in manifest.ranks:
        if rank.rollouts_jsonl:
            _publish(store, rank.rollouts_jsonl, directory / "train_rollouts.jsonl")
        _publish(store, rank.file, directory / ("train_rollouts.bin" if one_file else f"rank_{rank.data_rank}.bin"))


def _publish(store: Store, ref: BlobRef, target: Path) -> None:
    temporary = target.with_name(target.name + ".tmp")
    store.open(ref, verify=False)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        try:
            temporary.hardlink_to(store.path(ref.key))
        except OSError as error:
            if error.errno not in (
                errno.EXDEV,
                errno.EPERM,
                errno.EOPNOTSUPP,
            ):  # another file system, or one without links
                raise
            shutil.copyfile(store.path(ref.key), temporary)
        temporary.replace(target)
        temporary.unlink(missing_ok=True)  # a rename onto the same file leaves both names

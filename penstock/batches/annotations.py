"""What a trainer adds to a step afterwards, token by token: its own logprobs, above all.

trainer/annotations/step_000042.rank_00.safetensors    the arrays of the newest steps
trainer/annotations.rank_00.jsonl                       a line of means per step, the last one of a step holds
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.batches.batch_columns import Array
from penstock.batches.signals import FOLDER
from penstock.errors import BatchError
from penstock.store import atomic, tensors

STEPS_KEPT = 16
"""Steps whose arrays are kept, those that were written last: 4 bytes a token and name."""
LINES_BYTES = 16 << 20
"""Of the file of means: then it begins anew. A line has about 150 bytes."""
NAMES_MOST = 8
NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
DIRECTORY = "annotations"


def write_annotations(
    run_dir: Path, step: int, data_rank: int, arrays: Mapping[str, Array], *, logprobs: Array, loss_mask: Array
) -> None:
    """Arrays have one f32 entry per token of the rank's file; `logprobs` and `loss_mask` are the batch's own."""
    for name, array in arrays.items():
        if not NAME.fullmatch(name) or array.shape != loss_mask.shape:
            raise BatchError(
                f"annotate({name}=...): expected a name of small letters and one value for each of the "
                f"{loss_mask.size} tokens of step {step}, not {array.shape}"
            )
    directory = run_dir / FOLDER / DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    content = tensors.to_bytes(arrays, {"step": str(step), "data_rank": str(data_rank)})
    written = directory / f"step_{step:06d}.rank_{data_rank:02d}.safetensors"
    atomic.write(written, content)
    # Not by their numbers: a trainer that resumes from an older checkpoint writes earlier steps again.
    others = [path for path in directory.glob(f"step_*.rank_{data_rank:02d}.safetensors") if path != written]
    others.sort(key=lambda path: (path.stat().st_mtime_ns, path.name))
    for path in others[: 1 - STEPS_KEPT]:
        path.unlink(missing_ok=True)
    trained = loss_mask.astype(bool)
    line: dict[str, float] = {"step": step, "loss_tokens": int(trained.sum())}
    if line["loss_tokens"]:
        line |= {name: _rounded(array[trained].mean(dtype=np.float64)) for name, array in arrays.items()}
        if "logprobs" in arrays:
            line |= _mismatch(arrays["logprobs"][trained] - logprobs[trained])
    _append(run_dir / FOLDER / f"{DIRECTORY}.rank_{data_rank:02d}.jsonl", line)


def _mismatch(ratio: Array) -> dict[str, float]:
    """Of trainer and sampler: the estimate exp(r) - 1 - r of KL(sampler || trainer), r the trainer's logprob minus the
    sampler's, and the largest |r|."""
    ratio = np.clip(ratio.astype(np.float64), -20, 20)
    return {"kl": _rounded((np.expm1(ratio) - ratio).mean()), "mismatch_max": _rounded(np.abs(ratio).max())}


def _rounded(value: Any) -> float:
    return float(f"{float(value):.6g}")


def _append(path: Path, line: Mapping[str, float]) -> None:
    full = path.exists() and path.stat().st_size > LINES_BYTES
    with path.open("wb" if full else "ab") as file:
        file.write(json.dumps(line).encode() + b"\n")


def read_means(run_dir: Path) -> dict[int, dict[str, float]]:
    """step -> name -> its mean over the loss tokens of all ranks; of `mismatch_max` the maximum."""
    by_step: dict[int, dict[int, dict[str, float]]] = defaultdict(dict)
    for rank, path in enumerate(sorted((run_dir / FOLDER).glob(f"{DIRECTORY}.rank_*.jsonl"))):
        for line in _lines(path):
            by_step[int(line["step"])][rank] = line
    return {step: _mean(list(ranks.values())) for step, ranks in sorted(by_step.items())}


def _lines(path: Path) -> Iterator[dict[str, float]]:
    """A line that is being written is left out."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            values: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and "step" in values and "loss_tokens" in values:
            yield values


def _mean(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for rank in ranks for name in rank} - {"step", "loss_tokens"}
    means: dict[str, float] = {}
    for name in names:
        having = [(rank[name], rank["loss_tokens"]) for rank in ranks if name in rank]
        if name == "mismatch_max":
            means[name] = max(value for value, _ in having)
        elif tokens := sum(weight for _, weight in having):
            means[name] = sum(value * weight for value, weight in having) / tokens
    return means


def read_annotations(run_dir: Path, step: int, data_rank: int) -> dict[str, Array]:
    """The arrays of a rank, or none: they were not written, or are older than STEPS_KEPT steps."""
    path = run_dir / FOLDER / DIRECTORY / f"step_{step:06d}.rank_{data_rank:02d}.safetensors"
    try:
        return tensors.parse(np.fromfile(path, np.uint8)).arrays
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}

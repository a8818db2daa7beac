"""The alignment check: recorded logprobs and routed experts against Hugging Face's forward pass.

A token counts if it is trained and its version is exact. Its logprob must be that of the recorded version's weights,
given all tokens before it in its sample. A row of routed experts was computed for the next sampled token, by its
weights.
"""

import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headpond.batches.reader import Batch
from headpond.records.rollout import RolloutResult
from headpond.store import Store
from headpond.store.columns import read_columns
from headpond.store.experts import Experts

TOLERANCE = 1e-4
MISSING = -1
SCRIPT = Path(__file__).with_name("reference_forward.py")
Array = NDArray[Any]
Weights = Mapping[int, Path]
"""The directory of each version."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sequence as a trainer sees it: an entry per token."""

    name: str
    ids: Array
    trained: Array
    logprobs: Array
    versions: Array
    """MISSING on context"""
    exact: Array
    temperatures: Array
    experts: Array | None = None
    """[tokens, layers, top-k]; MISSING where the engine sent none"""

    @property
    def checked(self) -> Array:
        return (self.trained != 0) & (self.exact != 0)

    def row_versions(self) -> Array:
        """The version whose weights computed each row: that of the next sampled token. MISSING after the last."""
        versions = np.full(len(self.ids), MISSING)
        following, exact = MISSING, True
        for position in range(len(self.ids) - 1, -1, -1):
            versions[position] = following if exact else MISSING
            if self.versions[position] != MISSING:
                following, exact = int(self.versions[position]), bool(self.exact[position])
        return versions


@dataclass(kw_only=True)
class Alignment:
    tokens: int = 0
    """trained tokens with an exact version"""
    left_out: int = 0
    """trained tokens without one"""
    rows: int = 0
    largest: float = 0.0
    """difference of a logprob"""
    versions: set[int] = field(default_factory=set[int])
    problems: list[str] = field(default_factory=list[str])


class Reference:
    """The process that runs Hugging Face's forward pass; it keeps models in memory."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def forward(self, weights: Path, sample: Sample, adapter: Path | None = None) -> tuple[Array, Array]:
        """Logprobs [tokens] and experts [tokens, layers, top-k]."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        values = {"ids": sample.ids.tolist(), "temperature": sample.temperatures.tolist()}
        request = {"model": str(weights), "adapter": str(adapter) if adapter else None, **values}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the reference process ended: its error is on stderr"
        answer = json.loads(line)
        return np.array(answer["logprobs"]), np.array(answer["experts"])


@contextmanager
def reference_of(python: Path) -> Iterator[Reference]:
    with subprocess.Popen(
        [str(python), str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Reference(process)
        assert process.stdin is not None
        process.stdin.close()


def align(
    samples: Iterable[Sample],
    reference: Reference,
    weights: Weights,
    *,
    adapters: Mapping[int, Path] | None = None,
) -> Alignment:
    found = Alignment()
    for sample in samples:
        found.tokens += int(sample.checked.sum())
        found.left_out += int(((sample.trained != 0) & ~sample.checked).sum())
        for version in sorted(set(sample.versions[sample.checked].tolist())):
            if version not in weights:
                found.problems.append(f"{sample.name}: no weights of version {version}")
                continue
            found.versions.add(version)
            expected = reference.forward(weights[version], sample, (adapters or {}).get(version))
            _compare(found, sample, version, *expected)
    return found


def _compare(found: Alignment, sample: Sample, version: int, logprobs: Array, experts: Array) -> None:
    here = sample.checked & (sample.versions == version)
    difference = np.where(here, np.abs(sample.logprobs - logprobs), 0.0)
    found.largest = max(found.largest, float(difference.max()))
    for position in np.flatnonzero(difference > TOLERANCE)[:3].tolist():
        recorded, expected = float(sample.logprobs[position]), float(logprobs[position])
        found.problems.append(f"{sample.name}[{position}], version {version}: logprob {recorded}, expected {expected}")
    if sample.experts is None:
        return
    rows = (sample.row_versions() == version) & (sample.experts != MISSING).all(axis=(1, 2))
    found.rows += int(rows.sum())
    if sample.experts.shape != experts.shape:
        found.problems.append(f"{sample.name}: routes {sample.experts.shape}, expected {experts.shape}")
        return
    wrong = rows & (np.sort(sample.experts) != np.sort(experts)).any(axis=(1, 2))
    for position in np.flatnonzero(wrong)[:3].tolist():
        pair = sample.experts[position].tolist(), experts[position].tolist()
        found.problems.append(f"{sample.name}[{position}], version {version}: experts {pair[0]}, expected {pair[1]}")


def of_batch(batch: Batch) -> list[Sample]:
    samples: list[Sample] = []
    with_routes = any(rollout.experts for rollout in batch.plan.rollouts)
    for mb in batch.micro_batches():
        experts = mb.routed_experts(missing=MISSING) if with_routes else None
        for number, (start, stop) in enumerate(pairwise(mb.cu_seqlens.tolist())):
            if number >= len(mb.samples):
                continue  # padding
            part = slice(start, stop)
            samples.append(
                Sample(
                    name=f"step {batch.step}, rollout {batch.plan.rollouts[mb.samples.rollout_index[number]].rollout}",
                    ids=mb.input_ids[part],
                    trained=mb.loss_mask[part],
                    logprobs=mb.logprobs[part],
                    versions=mb.versions[part],
                    exact=mb.version_exact[part],
                    temperatures=mb.temperatures[part],
                    experts=None if experts is None else experts[part],
                )
            )
    return samples


def of_rollout(store: Store, result: RolloutResult) -> list[Sample]:
    assert result.columns is not None
    columns = read_columns(store, result.columns)
    experts = Experts(store, result.experts) if result.experts else None
    turns, tokens = columns.turns, columns.input_ids.size
    versions, temperatures, exact = np.full(tokens, MISSING), np.ones(tokens), np.ones(tokens, np.uint8)
    for turn in range(turns.start.size):
        part = slice(int(turns.start[turn]), int(turns.end[turn]))
        versions[part] = turns.version_first[turn]
        exact[part] = turns.version_exact[turn]
        temperatures[part] = turns.temperature[turn]
    for turn, start, version in zip(columns.span_turn, columns.span_start, columns.span_version, strict=True):
        versions[start : turns.end[turn]] = version
    samples: list[Sample] = []
    for number in range(columns.truncated.size):
        part = columns.sample(number)
        rows = None
        if experts:
            rows = np.empty((part.stop - part.start, *experts.rows.shape[1:]), np.int32)
            experts.read(number, 0, len(rows), rows, missing=MISSING)
        samples.append(
            Sample(
                name=f"{columns.rollout}/{number}",
                ids=columns.input_ids[part],
                trained=columns.loss_mask[part],
                logprobs=columns.logprobs[part],
                versions=versions[part],
                exact=exact[part],
                temperatures=temperatures[part],
                experts=rows,
            )
        )
    return samples


def shifted(sample: Sample, name: str) -> Sample:
    """The sample with one column moved by one token."""
    column = getattr(sample, name)
    return replace(sample, **{name: np.roll(column, 1, axis=0)})


def weights_of(models: Path, kind: str) -> dict[int, Path]:
    """The directory of each version of a tiny model."""
    return {int(directory.name): directory for directory in (models / kind).iterdir()}

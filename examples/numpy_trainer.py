"""A whole trainer in NumPy: trains the demo's model (headpond/demo/tiny_moe.py) on the batches of a run.

    python examples/numpy_trainer.py RUN_DIR [--seed SEED] [--keep-batches]

Killed at any line and started again, it continues from its checkpoint and reaches the same weights, bit for bit. At
every step it computes the recorded logprobs again, with the weights and the experts that sampled each token.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headpond.batches import Batch, BatchReader, MicroBatch
from headpond.batches.manifest import RECORDED, UNRECORDED
from headpond.demo import tiny_moe
from headpond.demo.tiny_moe import BEFORE, WINDOW, Weights
from headpond.store import atomic, tensors

LEARNING_RATE, MOMENTUM, SQUARES, TINY = 0.01, 0.9, 0.99, 1e-8  # Adam
CLIP = 0.2  # of the ratio of probabilities
TOLERANCE = 1e-4  # between the engine's logprobs and the trainer's
KEPT_VERSIONS = 12  # with the default filters.stale.max_off_policy_steps, a batch has tokens of the last 8 versions
Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The trained tokens of a micro-batch, one entry each."""

    ids: Array
    windows: Array
    routes: Array
    """of the token before, which was fed to the model when this one was sampled"""
    logprobs: Array
    advantages: Array
    loss_weights: Array
    temperatures: Array
    versions: Array
    version_exact: Array
    sampling: Array
    left: Array
    """bool [tokens, vocabulary]: the tokens that it was drawn from, where truncation was recorded"""

    @classmethod
    def of(cls, mb: MicroBatch) -> "Tokens":
        at = np.flatnonzero(mb.loss_mask)
        back = np.arange(WINDOW, 0, -1)
        before = mb.input_ids[np.maximum(at[:, None] - back, 0)]
        same_sample = back <= mb.position_ids[at][:, None]
        columns = ("logprobs", "advantages", "loss_weights", "temperatures", "versions", "version_exact", "sampling")
        return cls(
            ids=mb.input_ids[at],
            windows=np.where(same_sample, before, BEFORE),
            routes=mb.routed_experts(missing=-1)[at - 1],
            left=drawn_from(mb, at),
            **{name: getattr(mb, name)[at] for name in columns},
        )

    def where(self, chosen: Array) -> "Tokens":
        return Tokens(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})


def drawn_from(mb: MicroBatch, at: Array) -> Array:
    left = np.ones((len(at), tiny_moe.VOCABULARY), np.bool_)
    recorded = np.flatnonzero(mb.sampling[at] == RECORDED)
    support = mb.sampling_support()
    for row in recorded.tolist():
        left[row] = False
        left[row, support.ids[support.offsets[at[row]] : support.offsets[at[row] + 1]]] = True
    return left


def log_distributions(weights: Weights, tokens: Tokens) -> tuple[tiny_moe.ForwardPass, Array]:
    """Log-probabilities [tokens, vocabulary] at the sampling temperature, with routes and truncation replayed."""
    passed = tiny_moe.forward(weights, tokens.windows, tokens.routes)
    temperatures = tokens.temperatures.astype(passed.hidden.dtype)[:, None]
    scaled = tiny_moe.logits(weights, passed.hidden) / temperatures
    return passed, tiny_moe.log_softmax(np.where(tokens.left, scaled, -np.inf).astype(scaled.dtype))


def logprobs_of(weights: Weights, tokens: Tokens) -> Array:
    _, logs = log_distributions(weights, tokens)
    return np.take_along_axis(logs, tokens.ids[:, None], axis=1)[:, 0]


def loss_and_gradient(weights: Weights, tokens: Tokens, denominator: float) -> tuple[float, Weights]:
    """Of the clipped objective, weighted by `loss_weights`: the sum over all micro-batches is the step's loss."""
    passed, logs = log_distributions(weights, tokens)
    rows = np.arange(len(tokens.ids))
    ratios = np.exp(logs[rows, tokens.ids] - tokens.logprobs)
    share = tokens.loss_weights / denominator
    free, clipped = ratios * tokens.advantages, np.clip(ratios, 1 - CLIP, 1 + CLIP) * tokens.advantages
    loss = -float((share * np.minimum(free, clipped)).sum())
    of_logprobs = np.where(free <= clipped, -share * free, 0.0)  # a clipped token has no gradient
    of_logits = -np.exp(logs) * of_logprobs[:, None]
    of_logits[rows, tokens.ids] += of_logprobs
    of_logits /= tokens.temperatures[:, None]
    return loss, tiny_moe.gradient(weights, passed, of_logits.astype(logs.dtype))


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One line of `training.jsonl`."""

    step: int
    reward: float
    """mean over the rollouts of the step"""
    rollouts: int
    tokens: int
    """trained"""
    loss: float
    aligned: int
    """trained tokens with an exact version and a known distribution, whose logprobs were computed again"""
    largest_difference: float
    """of their logprobs"""
    versions: list[int]
    """that sampled them"""

    def __str__(self) -> str:
        return (
            f"step {self.step}: reward {self.reward:.2f}, {self.rollouts} rollouts, {self.tokens} tokens, "
            f"loss {self.loss:+.4f}, {self.aligned} logprobs within {self.largest_difference:.0e}"
        )


class Misaligned(SystemExit):
    """The engine sampled from another distribution than the trainer computes: training would be wrong."""


class Learner:
    def __init__(self, run_dir: Path, seed: int) -> None:
        """From the checkpoint of the run, if there is one."""
        self._run_dir = run_dir.resolve()
        self._checkpoint = self._run_dir / "checkpoint.safetensors"
        self.step = -1
        """last step that was trained"""
        self.weights = tiny_moe.initial_weights(seed)
        self._moments = {
            f"{kind}.{name}": np.zeros_like(array)
            for kind in ("first", "second")
            for name, array in self.weights.items()
        }
        if self._checkpoint.exists():
            self._load()
        self.save_version()
        self._recent = {version: tiny_moe.load(path) for version, path in self._version_directories().items()}

    @property
    def version(self) -> int:
        return self.step + 1

    @property
    def version_directory(self) -> Path:
        return self._run_dir / "weights" / f"version_{self.version}"

    def train(self, batch: Batch) -> StepReport:
        micro_batches = list(batch.micro_batches())
        tokens = [Tokens.of(mb) for mb in micro_batches]
        aligned, largest, versions = self._align(batch.step, tokens)
        loss, gradient = 0.0, {name: np.zeros_like(array) for name, array in self.weights.items()}
        for each in tokens:
            part, found = loss_and_gradient(self.weights, each, batch.totals.denominator)
            loss += part
            gradient = {name: gradient[name] + found[name] for name in gradient}
        self._update(gradient, updates=batch.step + 1)
        self.step = batch.step
        self._recent[self.version] = self.weights
        return StepReport(
            step=batch.step,
            reward=_mean_reward(micro_batches),
            rollouts=batch.totals.rollouts,
            tokens=sum(len(each.ids) for each in tokens),
            loss=loss,
            aligned=aligned,
            largest_difference=largest,
            versions=sorted(versions),
        )

    def _align(self, step: int, micro_batches: list[Tokens]) -> tuple[int, float, set[int]]:
        """Raises Misaligned if a logprob is not that of the recorded version and experts."""
        aligned, largest, versions = 0, 0.0, set[int]()
        for tokens in micro_batches:
            exact = tokens.where((tokens.version_exact != 0) & (tokens.sampling != UNRECORDED))
            for version in np.unique(exact.versions).tolist():
                if version not in self._recent:
                    raise Misaligned(
                        f"step {step} has tokens of version {version}, whose weights are no longer kept: lower "
                        "filters.stale.max_off_policy_steps, or keep more versions"
                    )
                chosen = exact.where(exact.versions == version)
                differences = np.abs(logprobs_of(self._recent[version], chosen) - chosen.logprobs)
                aligned, largest = aligned + len(differences), max(largest, float(differences.max()))
                versions.add(version)
                if not differences.max() <= TOLERANCE:
                    raise Misaligned(
                        f"step {step}: {np.count_nonzero(differences > TOLERANCE)} of {len(differences)} logprobs of "
                        f"version {version} differ from the engine's, by up to {differences.max():.1e}"
                    )
        return aligned, largest, versions

    def _update(self, gradient: Weights, *, updates: int) -> None:
        """Adam. `updates` counts this one."""
        for name, slope in gradient.items():
            first, second = self._moments[f"first.{name}"], self._moments[f"second.{name}"]
            first = self._moments[f"first.{name}"] = MOMENTUM * first + (1 - MOMENTUM) * slope
            second = self._moments[f"second.{name}"] = SQUARES * second + (1 - SQUARES) * slope**2
            change = first / (1 - MOMENTUM**updates) / (np.sqrt(second / (1 - SQUARES**updates)) + TINY)
            self.weights = {**self.weights, name: self.weights[name] - LEARNING_RATE * change}

    def save(self) -> None:
        """The checkpoint first: what follows from it can be repeated."""
        arrays = self._moments | {f"weights.{name}": array for name, array in self.weights.items()}
        atomic.write_durably(self._checkpoint, tensors.to_bytes(arrays, {"step": str(self.step)}), suffix="tmp")
        self.save_version()

    def save_version(self) -> None:
        """The weights as `headpond engine --model tiny-moe` loads them. Complete when `weights.json` is there."""
        tiny_moe.save(self.version_directory, self.weights)
        version = json.dumps({"version": self.version}).encode()
        atomic.write_durably(self.version_directory / "weights.json", version, suffix="tmp")

    def forget_old_versions(self) -> None:
        for version, directory in self._version_directories().items():
            if version <= self.version - KEPT_VERSIONS:
                self._recent.pop(version, None)
                shutil.rmtree(directory)

    def _version_directories(self) -> dict[int, Path]:
        found = (self._run_dir / "weights").glob("version_*/weights.json")
        versions = {int(path.parent.name.removeprefix("version_")): path.parent for path in found}
        return {version: path for version, path in versions.items() if version <= self.version}

    def _load(self) -> None:
        file = tensors.parse(np.frombuffer(self._checkpoint.read_bytes(), np.uint8))
        self.step = int(file.metadata["step"])
        self.weights = {name: file.arrays[f"weights.{name}"] for name in self.weights}
        self._moments = {name: file.arrays[name] for name in self._moments}


def _mean_reward(micro_batches: list[MicroBatch]) -> float:
    """Each rollout counts once, also if it has several samples."""
    rollouts = np.concatenate([mb.samples.rollout_index for mb in micro_batches])
    rewards = np.concatenate([mb.samples.reward for mb in micro_batches])
    return float(rewards[np.unique(rollouts, return_index=True)[1]].mean())


def train(run_dir: Path, *, seed: int, keep_batches: bool) -> Iterator[StepReport]:
    learner = Learner(run_dir, seed)
    reader = BatchReader(run_dir, data_rank=0, data_ranks=1, resume_step=learner.step)
    if learner.version:  # it may have been killed before it published them
        reader.publish_policy(learner.version, weights=learner.version_directory)
    for batch in reader:  # waits for the next batch; ends with the run
        report = learner.train(batch)
        learner.save()
        reader.ack(batch.step)
        reader.publish_policy(learner.version, weights=learner.version_directory)
        if not keep_batches:
            reader.checkpointed(batch.step)
        learner.forget_old_versions()
        yield report


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo's model on the batches of a run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of the first weights, as given to `headpond engine`")
    parser.add_argument("--keep-batches", action="store_true", help="never report a checkpoint: no file is deleted")
    options = parser.parse_args()
    for report in train(options.run_dir, seed=options.seed, keep_batches=options.keep_batches):
        print(report, flush=True)
        with (options.run_dir / "training.jsonl").open("a") as lines:
            lines.write(json.dumps(asdict(report)) + "\n")


if __name__ == "__main__":
    sys.exit(main())

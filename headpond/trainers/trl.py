"""TRL (1.16) reads a run: `HeadpondWorker` or `HeadpondRollouts`.

`AsyncGRPOTrainer(rollout_worker=..., weight_transfer=...)` takes the first,
`GRPOTrainer(rollout_func=..., reward_funcs=...)` the second.

Both acknowledge a step after TRL has taken all of its samples and updated its weights, and
publish these weights. A restarted program continues after the last acknowledged step;
`resume_step` names another one.
"""

import contextlib
import queue
import threading
import time
from collections import deque
from importlib import import_module
from pathlib import Path
from typing import Any

from headpond.batches.reader import Batch, BatchReader
from headpond.batches.signals import read_trainer
from headpond.errors import BatchError
from headpond.trainers.samples import TrainedSample, samples_of
from headpond.trainers.weights import PublishedWeights

QUEUED = 4096  # Samples of a step or two. The reader waits beyond that.
REWARD = "headpond_reward"


def _reader(run_dir: str | Path, resume_step: int | None = None, **options: Any) -> BatchReader:
    # TRL's checkpoints name no step: reading continues after the last acknowledged one.
    acked = read_trainer(Path(run_dir)).acked
    resume_step = acked if resume_step is None and acked >= 0 else resume_step
    return BatchReader(run_dir, data_rank=0, data_ranks=1, resume_step=resume_step, **options)


class HeadpondWorker:
    """TRL's `RolloutWorkerProtocol`: a thread reads sealed steps and queues their samples with
    finished advantages. TRL numbers its first weights 1."""

    def __init__(self, run_dir: str | Path, weights: PublishedWeights | None = None, **reader: Any) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(QUEUED)
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self._reader = _reader(run_dir, **reader)
        self._weights, self._trl_ahead = weights, 1
        self.start = threading.Thread(target=self._read, name="headpond", daemon=True).start
        self._failure: BaseException | None = None
        self._stopped, self._ended = threading.Event(), False
        self._queued = deque[tuple[int, int]]()
        """(step, number of samples queued up to its end). The thread appends entries, the
        trainer removes them."""
        self._put = 0
        self._sample = import_module("trl.experimental.async_grpo.async_rollout_worker").RolloutSample

    def stop(self) -> None:
        self._stopped.set()
        self._acknowledge()

    def update_model_version(self, model_version: int) -> None:
        """Acknowledge trained steps and announce the weights that TRL has sent."""
        self._acknowledge()
        if self._weights:
            self._trl_ahead = model_version - self._weights.version
            self._weights.announce(self._reader)

    def check_health(self, stale_after_s: float) -> None:
        if self._failure:
            raise BatchError(f"the run cannot be read: {self._failure}") from self._failure
        if self._ended and self.rollout_buffer.empty():
            raise BatchError("the run has ended and all its samples are taken: set max_steps to what it delivers")

    def _read(self) -> None:
        try:
            for batch in self._reader:
                for sample in samples_of(batch):
                    if sample.loss_mask.any():
                        self._offer(self._converted(sample, (batch.step << 20) + sample.group))
                if self._stopped.is_set():  # The rest of the step was not offered.
                    return
                self._queued.append((batch.step, self._put))
            self._ended = True
        except Exception as error:  # noqa: BLE001 - reported by check_health, in the trainer's own thread
            self._failure = error

    def _offer(self, sample: Any) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(queue.Full):
                self.rollout_buffer.put(sample, timeout=1.0)
                self._put += 1
                return

    def _converted(self, sample: TrainedSample, group: int) -> Any:
        columns = {"input_ids": sample.input_ids, "completion_mask": sample.loss_mask, "old_log_probs": sample.logprobs}
        version, metrics = sample.rollout.version_first + self._trl_ahead, {"reward": sample.rollout.reward}
        more = {"prompt": [], "completion": [], "group_id": group, "metrics": metrics}
        more |= {"advantage": sample.advantage, "model_version": version, "enqueued_at": time.time()}
        return self._sample(**columns, **more)

    def _acknowledge(self) -> None:
        taken = self._put - self.rollout_buffer.qsize()
        while self._queued and self._queued[0][1] <= taken:
            self._reader.ack(self._queued.popleft()[0])


class HeadpondRollouts:
    """The `rollout_func` of GRPOTrainer; `reward` is its reward function. Each call takes the
    next step, whatever prompts TRL names. TRL computes advantages itself: a step must have whole
    groups of `num_generations` rollouts, one sample each, and as many rollouts as TRL requests."""

    def __init__(self, run_dir: str | Path, weights: PublishedWeights | None = None, **reader: Any) -> None:
        self._reader, self._weights, self._step = _reader(run_dir, **reader), weights, -1

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        self.acknowledge(trainer)
        batch: Batch = next(self._reader)
        self._step, samples = batch.step, list(samples_of(batch))
        size, group = len(prompts), trainer.num_generations
        whole = all(len({sample.group for sample in samples[n : n + group]}) == 1 for n in range(0, size, group))
        if len(samples) != size or not whole:
            raise BatchError(
                f"step {batch.step} has {len(samples)} samples, and TRL asks for {size} in groups of {group}: set "
                f'rollouts.group_size = {group}, rollouts.partial_groups = "drop", batch.size = {size // group}, '
                "policy.max_samples = 1"
            )
        return {
            "prompt_ids": [sample.input_ids[: sample.prompt_length].tolist() for sample in samples],
            "completion_ids": [sample.after_prompt(sample.input_ids) for sample in samples],
            "logprobs": [sample.after_prompt(sample.logprobs) for sample in samples],
            "env_mask": [sample.after_prompt(sample.loss_mask) for sample in samples],
            REWARD: [sample.rollout.reward for sample in samples],
        }

    def acknowledge(self, trainer: Any) -> None:
        """Acknowledge the previous step, which is trained now. Call it once more after
        `trainer.train()`."""
        if self._weights:
            self._weights.send_weights(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
            self._weights.announce(self._reader)
        if self._step >= 0:
            self._reader.ack(self._step)

    @staticmethod
    def reward(**fields: Any) -> list[float]:
        return fields[REWARD]

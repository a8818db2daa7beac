"""A simulated trainer: reads every sealed step with the real `BatchReader`, acknowledges, checkpoints, goes back."""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64

from headpond.batches import BatchReader, Manifest, read_manifest
from headpond.batches.reader import Batch
from headpond.batches.signals import Checkpoint, read_progress, write_checkpoint, write_progress
from headpond.errors import BatchError
from headpond.store import open_store

if TYPE_CHECKING:
    from simulation.world import World

POLL_S = 0.5


class SimulatedTrainer:
    """The real reader opens its epochs; it does not read prime-rl's formats, so steps are read here.

    What it has read stays: a step that is delivered again must be the same, byte for byte."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._random = world.random("trainer")
        self.digests: dict[int, str] = {}
        self.checkpoint = self.acked = -1
        self.silent_until = 0.0
        self._process: Any = None

    def start(self) -> None:
        self._process = self._world.new_process("trainer")
        self._world.live(self._process, self._train())

    def set_back(self) -> None:
        """Kill it; the next one begins after the last checkpoint."""
        self._process.kill()
        self._world.policy_version = self.checkpoint + 1
        self.start()

    async def _train(self) -> None:
        config, world = self._world.config, self._world
        ranks = config.batch.data_ranks
        while not (config.run_dir / "run.json").exists():
            await asyncio.sleep(POLL_S)
        readers = [
            BatchReader(config.run_dir, data_rank=rank, data_ranks=ranks, resume_step=self.checkpoint)
            for rank in range(ranks)
        ]
        progress = [read_progress(config.run_dir, rank) for rank in range(ranks)]
        readers[0].publish_policy(self.checkpoint + 1)
        step, store = self.checkpoint + 1, open_store(config.store_url)
        while True:
            manifest = read_manifest(store, step) if world.loop.now >= self.silent_until else None
            if manifest is None:
                await asyncio.sleep(POLL_S)
                continue
            await asyncio.sleep(self._random.uniform(0.1, 3.0))
            self._check(manifest)
            for before in progress:
                assert before is not None
                write_progress(config.run_dir, replace(before, acked=step))
                await asyncio.sleep(self._random.uniform(0, 0.3))
            world.policy_version = step + 1
            self.acked = step
            readers[0].publish_policy(step + 1)
            if world.config.trainer.release_on == "acked":
                self.checkpoint = step
            elif self._random.random() < world.checkpoint_rate:
                write_checkpoint(config.run_dir, Checkpoint(step=step))
                self.checkpoint = step
            step += 1

    def _check(self, manifest: Manifest) -> None:
        """Also that every file is there: nothing of a step is released before it is acknowledged."""
        digest, store, step = xxh3_64(), open_store(self._world.config.store_url), manifest.plan.step
        for rank in manifest.ranks:
            digest.update(store.open(rank.file).data)
            if manifest.plan.format == "native":
                batch = Batch(store, manifest, rank.data_rank)
                for each in batch.micro_batches():
                    digest.update(each.advantages.tobytes())
        for rollout in manifest.plan.rollouts:
            for ref in (rollout.columns, rollout.experts):
                if ref is not None:
                    digest.update(store.open(ref).data)
        before = self.digests.setdefault(step, digest.hexdigest())
        if before != digest.hexdigest():
            raise BatchError(f"step {step} was read before with other content")

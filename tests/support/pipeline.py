"""A cluster with an engine and real stages, and a trainer that reads the batches."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headpond.batches import Manifest, read_manifests
from headpond.store.files import FileStore
from support.cluster import Cluster, Process, assert_nothing_left_in_redis, cluster_in
from support.engine_process import EngineProcess
from support.stores import directory_store
from support.waiting import wait_until

TRAINER = Path(__file__).with_name("trainer.py")
DEFAULTS: dict[str, Any] = {
    "steps": 4,
    "batch": {"size": 4, "seq_len": 4096},
    "rollouts": {"group_size": 4},
    "policy": {"seeded": True},
    "recovery": {"lease_s": 2.0, "drain_s": 20.0},
    "environments.sums": {"use": "arithmetic"},
}


class Pipeline:
    def __init__(self, cluster: Cluster, engine: EngineProcess, settings: dict[str, Any]) -> None:
        self.cluster = cluster
        self.engine = engine
        self._settings = settings
        self.trainers: list[Process] = []

    def new_run(self, name: str, **settings: Any) -> None:
        """End the processes of the last run. The store is in the run directory, where a trainer reads it by default."""
        cluster = self.cluster
        for process in cluster.processes:
            process.end()
        cluster.redis.flushall()
        cluster.new_run(name)
        cluster.store = cluster.run_dir / "store"
        host, port = self.engine.address
        engine = {"urls": [f"http://{host}:{port}"], "routed_experts": True, "unreachable_s": 0.5}
        engine["versions"] = "announced"  # the trainer of the tests loads no weights
        values = DEFAULTS | {"engine": engine} | self._settings
        for key, value in settings.items():
            values[key] = values.get(key, {}) | value if isinstance(value, dict) else value
        # Workers read their configuration at start: write it before they start.
        cluster.configure(**values)

    def trainer(self, *, resume_step: int = -1, hang_at: int = -1, checkpoint_every: int = 5) -> Process:
        numbers = map(str, (0, 1, resume_step, hang_at, checkpoint_every))
        trainer = self.cluster.start("trainer", sys.executable, str(TRAINER), str(self.cluster.run_dir), *numbers)
        self.trainers.append(trainer)
        return trainer

    def restart_engine(self, *arguments: str) -> None:
        """Another process at the same address."""
        _, port = self.engine.address
        self.engine = EngineProcess(self.cluster.directory, "--port", str(port), *arguments)
        assert self.engine.address[1] == port

    def encoder(self) -> Process:
        return self.compute("encoding")

    def compute(self, queues: str) -> Process:
        return self.cluster.worker("compute", queues, 1)

    @property
    def store(self) -> FileStore:
        return directory_store(self.cluster.store)

    @property
    def manifests(self) -> dict[int, Manifest]:
        return read_manifests(self.store)

    def finish(self, run: Process, *trainers: Process) -> dict[str, Any]:
        """Wait for run and trainers to end, then check the audit and that every file is named by a manifest."""
        assert run.wait() == 0, run.text[-3000:]
        for trainer in trainers:
            assert trainer.wait() == 0, trainer.text[-3000:]
        result = self.cluster.audit()
        assert result["balanced"], result["problems"]
        assert result["in_flight"] == 0
        assert_nothing_left_in_redis(self.cluster)
        self.assert_every_file_is_named()
        return result

    def assert_every_file_is_named(self) -> None:
        named = {"run"}
        for manifest in self.manifests.values():
            refs = [ref for rank in manifest.ranks for ref in (rank.file, rank.rollouts_jsonl)]
            refs += [ref for rollout in manifest.plan.rollouts for ref in (rollout.columns, rollout.experts)]
            named |= {ref.key for ref in refs if ref} | {f"{manifest.plan.directory}/manifest.json"}
        root = self.cluster.store
        there = {
            path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file() and path.name != ".lock"
        }
        assert there <= named, sorted(there - named)[:10]


def hashes(trainer: Process) -> dict[int, str]:
    """step -> hash of the data that the trainer read"""
    lines = [json.loads(line) for line in trainer.text.splitlines() if line.startswith("{")]
    return {line["step"]: line["hash"] for line in lines if "step" in line}


def wait_state(cluster: Cluster, state: str, at_least: int = 1) -> None:
    what = f"{at_least} rollouts to be {state}"
    wait_until(lambda: cluster.status().states.get(state, 0) >= at_least, what=what)


@contextmanager
def pipeline_in(directory: Path, *engine: str, **settings: Any) -> Iterator[Pipeline]:
    directory.mkdir(exist_ok=True)
    process = EngineProcess(directory, "--layers", "4", *engine)
    try:
        with cluster_in(directory) as cluster:
            pipeline = Pipeline(cluster, process, settings)
            yield pipeline
            process = pipeline.engine
    finally:
        process.end()

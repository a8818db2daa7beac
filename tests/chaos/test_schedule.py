"""A seeded random schedule of faults, over 2,000 short rollouts.

`make chaos` plays many seeds; the test run plays one.
"""

import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cluster import Cluster, Process, cluster_in
from support.waiting import wait_until

FAULTS = 10
SETTINGS = {
    "steps": 10,
    "batch": {"size": 25, "data_ranks": 2},
    "rollouts": {"group_size": 8, "max_in_flight": 400},
    "recovery": {"lease_s": 2.0, "max_losses": 50, "max_failures": 6},
    "noop": {"rollout_s": 0.1, "failure_rate": 0.02, "policy_error_rate": 0.05, "drop_rate": 0.02},
}


class Chaos:
    """One run with two rollout workers and one compute worker, and the faults that it must survive."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        self.engine_down = cluster.directory / "engine-down"
        self.wedge = cluster.directory / "wedge"
        self.workers = [self.rollout_worker(), self.rollout_worker()]
        self.compute = cluster.compute_worker()
        self.run = cluster.orchestrator()
        self.played: list[str] = []
        self.faults: list[Callable[[], None]] = [
            self.kill_worker, self.pause_worker, self.wedge_worker, self.stop_worker, self.kill_compute,
            self.kill_orchestrator, self.pause_orchestrator, self.drain_orchestrator, self.kill_redis, self.flush_redis,
            self.reset_connections, self.lose_engine, self.deliver_twice,
        ]  # fmt: skip

    def rollout_worker(self) -> Process:
        paths = {"ENGINE_DOWN_WHILE": self.engine_down, "WEDGE_WHILE": self.wedge}
        variables = {f"PENSTOCK_NOOP__{name}": str(path) for name, path in paths.items()}
        return self.cluster.rollout_worker(concurrency=32, **variables)

    def play(self) -> None:
        """Play one fault after another, each when the run has progressed since the last."""
        for fault in self.random.choices(self.faults, k=FAULTS):
            if not self.progressed():
                break
            self.played.append(fault.__name__)
            fault()

    def progressed(self) -> bool:
        """Wait for progress. False when the run has ended."""
        enough = self.generated() + self.random.randrange(20, 120)
        wait_until(
            lambda: self.run.exit_code is not None or self.generated() > enough,
            what=f"progress after {self.played}",
        )
        return self.run.exit_code is None

    def generated(self) -> int:
        rollouts = self.cluster.status().get("rollouts", {})
        return rollouts.get("planned", 0) - rollouts.get("in_flight", 0) + self.cluster.status().get("step", 0)

    def kill_worker(self) -> None:
        self.workers.pop(0).kill()
        self.workers.append(self.rollout_worker())

    def stop_worker(self) -> None:
        self.workers[0].signal(self.random.choice([signal.SIGTERM, signal.SIGQUIT]))
        self.workers.append(self.rollout_worker())
        self.workers.pop(0).wait()

    def pause_worker(self) -> None:
        paused = self.workers[0]
        before = self.cluster.events("lost")
        paused.signal(signal.SIGSTOP)
        self.until(lambda: self.cluster.events("lost") > before)
        paused.signal(signal.SIGCONT)

    def wedge_worker(self) -> None:
        before = self.cluster.events("lost")
        self.wedge.touch()
        self.until(lambda: self.cluster.events("lost") > before)
        self.wedge.unlink()

    def kill_compute(self) -> None:
        self.compute.kill()
        self.compute = self.cluster.compute_worker()

    def kill_orchestrator(self) -> None:
        self.run.kill()
        self.run = self.cluster.orchestrator()

    def drain_orchestrator(self) -> None:
        self.run.signal(signal.SIGINT)
        self.run.wait()
        self.run = self.cluster.orchestrator()

    def pause_orchestrator(self) -> None:
        self.run.signal(signal.SIGSTOP)
        self.until(lambda: self.cluster.redis.llen("rollouts") == 0)
        self.run.signal(signal.SIGCONT)

    def kill_redis(self) -> None:
        self.cluster.redis_server.kill()
        self.cluster.redis_server.restart()

    def flush_redis(self) -> None:
        self.cluster.redis.flushall()

    def reset_connections(self) -> None:
        for kind in ("normal", "pubsub"):
            self.cluster.redis.client_kill_filter(_type=kind, skipme=True)

    def lose_engine(self) -> None:
        self.engine_down.touch()
        self.until(lambda: any("engine" in cause for cause in self.cluster.status().get("waiting_for", [])))
        self.engine_down.unlink()

    def deliver_twice(self) -> None:
        messages = self.cluster.redis.lrange("rollouts", 0, -1)
        if messages:
            self.cluster.redis.rpush("rollouts", *messages)

    def until(self, is_visible: Callable[[], object]) -> None:
        """Wait until the fault has an effect, or the run has ended."""
        wait_until(lambda: self.run.exit_code is not None or is_visible(), what=f"effect of {self.played[-1]}")


def test_a_random_schedule_of_faults_loses_nothing(tmp_path: Path, chaos_seed: int) -> None:
    with cluster_in(tmp_path, **SETTINGS) as cluster:
        chaos = Chaos(cluster, chaos_seed)
        chaos.play()
        result = cluster.finish(chaos.run)
        assert result["steps"] == 10
        assert result["delivered"] >= 1800, chaos.played


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "chaos_seed" in metafunc.fixturenames:
        rounds: int = metafunc.config.getoption("--chaos-rounds")
        metafunc.parametrize("chaos_seed", range(1, rounds + 1))

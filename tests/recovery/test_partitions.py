"""A worker that cannot reach Redis, or is not reached by it: its rollouts run elsewhere, and it is used again after."""

import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.cluster import Cluster, Process, cluster_in
from support.partitions import Direction, Link, Links, NetworkNamespace, links, network_namespace
from support.waiting import wait_until

from headpond.broker import redis_keys
from headpond.ids import LeaseId


@pytest.fixture(scope="module")
def opened() -> Iterator[Links]:
    with links() as opened:
        yield opened


@contextmanager
def far_worker(cluster: Cluster, opened: Links, hold: Path) -> Iterator[tuple[Process, NetworkNamespace | Link]]:
    """A rollout worker in a network namespace; where there can be none, one behind a link, and a warning says so."""
    with network_namespace() as namespace:
        held = {"NOOP_HOLD_WHILE": str(hold)}
        if isinstance(namespace, str):
            warnings.warn(f"no network namespace ({namespace}): a proxy cuts the connections instead", stacklevel=2)
            near = opened.to(cluster.redis_server.port)
            worker = cluster.rollout_worker(8, HEADPOND_REDIS_URL=f"redis://127.0.0.1:{near.port}/0", **held)
            yield worker, near
            return
        far = opened.to(cluster.redis_server.port, host=namespace.outside)
        cluster.enter = namespace.enter
        worker = cluster.rollout_worker(8, HEADPOND_REDIS_URL=f"redis://{namespace.outside}:{far.port}/0", **held)
        cluster.enter = []
        yield worker, namespace


def running(cluster: Cluster, worker: Process) -> int:
    """Executions of the worker that the run waits for: it may still hold leases of attempts that were given up."""
    awaited = set(cluster.ledger("SELECT id, attempt FROM jobs WHERE state = 'submitted'"))
    leases = cluster.redis.hgetall(redis_keys.LEASES).items()  # type: ignore[union-attr]
    held = [LeaseId.match(lease.decode()) for lease, value in leases if f"-{worker.pid}:" in value.decode()]
    return sum(lease is not None and (lease.job, lease.attempt) in awaited for lease in held)


def test_a_worker_that_is_cut_off_loses_its_rollouts_and_is_used_again(tmp_path: Path, opened: Links) -> None:
    """Its rollouts are held before it is cut off, so that their leases are there."""
    few, hold = {"max_in_flight": 48}, tmp_path / "hold"
    with cluster_in(tmp_path, steps=1000, rollouts=few, noop={"rollout_s": 0.5}) as cluster:
        cluster.compute_worker()
        cluster.rollout_worker(8)
        with far_worker(cluster, opened, hold) as (worker, network):
            run = cluster.orchestrator()
            wait_until(lambda: cluster.status().step, what="a step")
            for direction in (Direction.THERE, Direction.BACK, Direction.BOTH):
                hold.touch()
                wait_until(lambda: running(cluster, worker), what=f"held rollouts before a cut of {direction}")
                before, step = cluster.events("lost"), cluster.status().step
                network.cut(direction)
                wait_until(lambda before=before: cluster.events("lost") > before, what="its leases to expire")
                wait_until(lambda step=step: cluster.status().step > step, what="a step without it")
                network.cut(Direction.NONE)
                hold.unlink()
                wait_until(lambda: running(cluster, worker), what="the worker to be used again")
            run.signal(signal.SIGINT)
            assert run.wait() == 0, run.text
        result = cluster.audit()
        assert result["balanced"], result["problems"]
        assert result["dead"] == 0
        assert cluster.ledger("SELECT sum(failures) FROM kept_jobs") == [(0,)]

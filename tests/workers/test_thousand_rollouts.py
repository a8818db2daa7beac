"""One worker process with a thousand rollouts at once, started with the documented command."""

import json
from pathlib import Path

import pytest
from support.cluster import Cluster, Process, cluster_in
from support.waiting import wait_until

from headpond.broker import redis_keys
from headpond.broker.queues import Queue
from headpond.event_loop.lag_summaries import read_summaries
from headpond.tasks import envelope
from headpond.tasks.stages import play

ROLLOUTS = 1000


def submit(cluster: Cluster) -> None:
    jobs = [
        play.PlayMessage(
            run="run", job=f"r{number}", attempt=1, sequence=number, timeout_s=600,
            environment="noop", example=number, seed=number,
        )
        for number in range(ROLLOUTS)
    ]  # fmt: skip
    cluster.redis.lpush(Queue.ROLLOUTS, *(envelope.encode(play.STAGE, job) for job in jobs))


def replies(cluster: Cluster) -> list[str]:
    entries = cluster.redis.xrange(redis_keys.replies("run"))
    return [json.loads(fields[b"reply"])["outcome"] for _, fields in entries]  # type: ignore[union-attr]


def beats(cluster: Cluster) -> set[bytes]:
    return {value.rpartition(b":")[2] for value in cluster.redis.hvals(redis_keys.LEASES)}  # type: ignore[union-attr]


def own_lag(cluster: Cluster, worker: Process) -> str:
    return next((lag.process for lag in read_summaries(cluster.redis) if lag.process.endswith(f"-{worker.pid}")), "")


@pytest.mark.timeout(300)
def test_a_thousand_rollouts_run_at_once_in_one_process(tmp_path: Path) -> None:
    """Each holds a lease, all leases are renewed together, and the loop's lag is published."""
    hold = tmp_path / "hold"
    hold.touch()
    with cluster_in(tmp_path, noop={"hold_while": str(hold)}) as cluster:
        worker = cluster.rollout_worker(concurrency=ROLLOUTS)
        submit(cluster)
        wait_until(lambda: len(cluster.leases()) == ROLLOUTS, what="all hold a lease")
        wait_until(lambda: len(beats(cluster)) == 1, what="all leases are renewed by one command")
        hold.unlink()
        wait_until(lambda: len(replies(cluster)) == ROLLOUTS, what="all have ended")
        assert set(replies(cluster)) == {"done"}
        wait_until(lambda: not cluster.leases(), what="no lease is left")
        wait_until(lambda: "action=loop_lag process=rollouts@" in worker.text, what="its log line of lag")
        wait_until(lambda: own_lag(cluster, worker), what="its lag is published")
        assert "action=few_descriptors" not in worker.text
        cluster.redis.delete(redis_keys.replies("run"))

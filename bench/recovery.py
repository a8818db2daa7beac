"""`python -m bench recovery`: time from killing a worker with 64 rollouts until all run on another.

The other worker starts after the first has taken all rollouts. There is no measured baseline: with late acknowledgement
and its default visibility time-out, stock Celery takes an hour or more.
"""

import functools
import time
from contextlib import closing
from dataclasses import dataclass

from bench.harness.cluster import NOOPS, Cluster, Run, start_cluster
from bench.harness.progress import Show, progress
from bench.harness.report import Report, Target, median
from headpond.broker import redis_keys
from headpond.ids import LeaseId, LeaseValue, WorkerId
from headpond.inspection.audit import audit
from headpond.ledger.schema import open_for_reading
from headpond.processes.child_process import ChildProcess

ROUNDS = 5
GROUP_SIZE, STEPS = 8, 2
ENDLESS_S = 3600.0  # duration of rollouts on the worker that is killed: none ends before the kill
AFTERWARDS_S = 1.0  # duration of rollouts on the other worker
GRACE_S = 5.0
ROUND_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Size:
    rollouts: int
    lease_s: float


FULL = Size(rollouts=64, lease_s=10.0)
QUICK = Size(rollouts=16, lease_s=2.0)


@dataclass(frozen=True, kw_only=True)
class Round:
    noticed_s: float
    """from the kill until the last rollout is recorded as lost in the ledger"""
    running_s: float
    """from the kill until the last rollout holds a lease again"""
    lost: int
    problems: int
    """found by the audit, such as a rollout in two steps"""


def run(*, quick: bool) -> Report:
    size, count = (QUICK, 1) if quick else (FULL, ROUNDS)
    rounds: list[Round] = []
    with progress("recovery") as show, start_cluster(**_settings(size)) as cluster:
        cluster.compute_worker(concurrency=1)
        for number in range(1, count + 1):
            here = f"round {number} of {count}"
            rounds.append(_round(cluster, size, lambda text, here=here: show(f"{here}: {text}")))
    return _report(rounds, size, quick=quick)


def _settings(size: Size) -> dict[str, object]:
    return {
        **NOOPS,
        "steps": STEPS,
        "batch__unit": "rollouts",
        "batch__size": size.rollouts // STEPS,
        "rollouts__group_size": GROUP_SIZE,
        "recovery__lease_s": size.lease_s,
        "noop_rollout_s": AFTERWARDS_S,
    }


def _round(cluster: Cluster, size: Size, show: Show) -> Round:
    show(f"starting a worker and {size.rollouts} rollouts")
    doomed = cluster.rollout_worker(concurrency=size.rollouts, noop_rollout_s=ENDLESS_S)
    run = cluster.orchestrator()
    wait_until = functools.partial(run.process.wait_until, timeout_s=ROUND_S)
    wait_until(lambda: len(_running_on(doomed, cluster)) == size.rollouts, what="all rollouts are running")
    other = cluster.rollout_worker(concurrency=size.rollouts)
    cluster.wait_ready()
    killed_at = time.time()
    cluster.kill(doomed)
    running_again: set[str] = set()

    def all_run_again() -> bool:
        running_again.update(_running_on(other, cluster))
        show(f"the worker was killed; {len(running_again)} of {size.rollouts} rollouts run elsewhere")
        return len(running_again) == size.rollouts

    wait_until(all_run_again, what="all rollouts are running again")
    running_s = time.time() - killed_at
    wait_until(lambda: run.process.ended, what="the run has ended")
    result = audit(run.directory)
    cluster.kill(run.process)
    cluster.kill(other)
    return Round(
        noticed_s=_last_loss_at(run) - killed_at,
        running_s=running_s,
        lost=result["planned"] - result["delivered"],
        problems=len(result["problems"]),
    )


def _running_on(worker: ChildProcess, cluster: Cluster) -> set[str]:
    """Rollouts with a lease on this worker."""
    leases: dict[bytes, bytes] = cluster.redis.hgetall(redis_keys.LEASES)  # pyright: ignore[reportAssignmentType]
    return {
        id.job
        for lease, value in leases.items()
        if (id := LeaseId.match(lease.decode())) and (held := LeaseValue.match(value.decode()))
        if WorkerId.parse(held.worker).pid == worker.pid
    }


def _last_loss_at(run: Run) -> float:
    with closing(open_for_reading(run.directory / "ledger.sqlite")) as ledger:
        lost_at = ledger.execute("SELECT max(at) FROM events WHERE action = 'lost'").fetchone()[0]
    assert lost_at is not None, "no job was counted as lost"
    return lost_at


def _report(rounds: list[Round], size: Size, *, quick: bool) -> Report:
    noticed_s, running_s = [each.noticed_s for each in rounds], [each.running_s for each in rounds]
    figures = {"rollouts running at the kill": float(size.rollouts), "lease, s": size.lease_s}
    for what, seconds in {"noticed": noticed_s, "running again": running_s}.items():
        figures |= {f"{what} after, s, round {number}": value for number, value in enumerate(seconds, 1)}
        figures |= {f"{what} after, s, median": median(seconds), f"{what} after, s, worst": max(seconds)}
    targets = [
        Target(name="all running again after, s, worst", value=max(running_s), limit=size.lease_s + GRACE_S),
        Target(name="rollouts lost", value=sum(each.lost for each in rounds), limit=0),
        Target(name="problems in the audit", value=sum(each.problems for each in rounds), limit=0),
    ]
    return Report(bench="recovery", figures=figures, targets=targets, rounds=len(rounds), quick=quick)

"""`penstock bench recovery`: a worker is killed with 64 rollouts running; how long until all of them run elsewhere.

The other worker starts when the first has taken them all, so that none is running there before. What a stock Celery
worker would take (late acknowledgement, default visibility time-out) is an hour and more: stated, not measured.
"""

import functools
import time
from contextlib import closing
from dataclasses import dataclass

from bench.cluster import Cluster, Run, cluster
from bench.processes import Process
from bench.progress import Say, progress
from bench.report import Report, Target, median
from orchestrator.ledger.audit import audit
from penstock import redis_keys
from penstock.ids import LeaseId, LeaseValue, WorkerId
from penstock.ledger import queries
from penstock.ledger.schema import open_for_reading

ROUNDS = 5
GROUP_SIZE, STEPS = 8, 2
FOR_EVER_S = 3600.0  # the killed worker's rollouts never end by themselves
AFTERWARDS_S = 1.0  # the other worker's rollouts end soon after they all run
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
    """from the kill until the ledger has the last of them as lost"""
    running_s: float
    """from the kill until the last of them holds a lease again"""
    lost: int
    problems: int
    """of the audit: a rollout in two steps is one"""


def run(*, quick: bool) -> Report:
    size, count = (QUICK, 1) if quick else (FULL, ROUNDS)
    rounds: list[Round] = []
    with progress("recovery") as say, cluster(**_settings(size)) as own:
        own.compute_worker(concurrency=1)
        for number in range(1, count + 1):
            here = f"round {number} of {count}"
            rounds.append(_round(own, size, lambda text, here=here: say(f"{here}: {text}")))
    return _report(rounds, size, quick=quick)


def _settings(size: Size) -> dict[str, object]:
    return {
        "steps": STEPS,
        "batch__unit": "rollouts",
        "batch__size": size.rollouts // STEPS,
        "rollouts__group_size": GROUP_SIZE,
        "recovery__lease_s": size.lease_s,
        "noop__rollout_s": AFTERWARDS_S,
    }


def _round(own: Cluster, size: Size, say: Say) -> Round:
    say(f"starting a worker and {size.rollouts} rollouts")
    doomed = own.rollout_worker(concurrency=size.rollouts, noop__rollout_s=FOR_EVER_S)
    run = own.orchestrator()
    wait_until = functools.partial(run.process.wait_until, timeout_s=ROUND_S)
    wait_until(lambda: len(_running_on(doomed, own)) == size.rollouts, what="all rollouts run")
    other = own.rollout_worker(concurrency=size.rollouts)
    own.wait_ready()
    killed_at = time.time()
    own.kill(doomed)
    seen_again: set[str] = set()

    def all_run_again() -> bool:
        seen_again.update(_running_on(other, own))
        say(f"the worker was killed; {len(seen_again)} of {size.rollouts} rollouts run elsewhere")
        return len(seen_again) == size.rollouts

    wait_until(all_run_again, what="all rollouts run again")
    running_s = time.time() - killed_at
    wait_until(lambda: run.process.ended, what="the run's end")
    found = audit(run.directory)
    own.kill(run.process)
    own.kill(other)
    return Round(
        noticed_s=_last_loss_at(run) - killed_at,
        running_s=running_s,
        lost=found["planned"] - found["delivered"],
        problems=len(found["problems"]),
    )


def _running_on(worker: Process, own: Cluster) -> set[str]:
    """The rollouts of which an execution there holds a lease."""
    leases: dict[bytes, bytes] = own.redis.hgetall(redis_keys.LEASES)  # pyright: ignore[reportAssignmentType]
    return {
        id.job
        for lease, value in leases.items()
        if (id := LeaseId.match(lease.decode())) and (held := LeaseValue.match(value.decode()))
        if WorkerId.parse(held.worker).pid == worker.pid
    }


def _last_loss_at(run: Run) -> float:
    with closing(open_for_reading(run.directory / "ledger.sqlite")) as ledger:
        lost_at = queries.last_event_at(ledger, "lost")
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

"""`python -m bench control`: CPU time and throughput of the pipeline itself, against a stock Celery worker.

No-op rollouts in groups of 8, all submitted at once, pass the four queues with the ledger on disk and task events on.
CPU time is summed over all processes, from the moment the orchestrator begins to plan until it has ended.
"""

import time
from dataclasses import dataclass

from bench.harness import stock_celery
from bench.harness.canary import INTERVAL_S, Canary
from bench.harness.cluster import NOOPS, Cluster, Run, start_cluster
from bench.harness.progress import Show, progress
from bench.harness.report import Report, Target, median
from headpond.errors import RunError
from headpond.inspection.audit import audit

ROUNDS = 5
GROUP_SIZE = 8
ROUND_S = 300.0  # time-out; about 20 s are usual
COMPUTE_PROCESSES = 2
KINDS = ("redis", "rollout worker", "compute worker", "orchestrator")


@dataclass(frozen=True, kw_only=True)
class Size:
    steps: int
    step_groups: int
    messages: int
    """for the stock worker"""

    @property
    def rollouts(self) -> int:
        return self.steps * self.step_groups * GROUP_SIZE


FULL = Size(steps=25, step_groups=25, messages=2000)
QUICK = Size(steps=2, step_groups=2, messages=20)


@dataclass(frozen=True, kw_only=True)
class PipeRound:
    cpu_ms: dict[str, float]
    """per rollout, by kind of process"""
    rollouts_per_s: float
    lag_p99_ms: float
    canary_p99_ms: float

    @property
    def all_cpu_ms(self) -> float:
        return sum(self.cpu_ms.values())


@dataclass(frozen=True, kw_only=True)
class StockRound:
    cpu_ms: float
    """per message, including Redis"""
    messages_per_s: float


def run(*, quick: bool) -> Report:
    size, rounds = (QUICK, 1) if quick else (FULL, ROUNDS)
    pipe: list[PipeRound] = []
    stock: list[StockRound] = []
    with progress("control") as show, Canary() as canary, start_cluster(**_settings(size)) as cluster:
        show("starting Redis and the workers")
        cluster.rollout_worker(concurrency=256)
        cluster.compute_worker(concurrency=COMPUTE_PROCESSES)
        cluster.worker("stock worker", "bench.harness.stock_celery", ["-c", "2"], _stock_url(cluster))
        cluster.wait_ready()
        for number in range(1, rounds + 1):
            here = f"round {number} of {rounds}"
            pipe.append(_pipe(cluster, canary, size, lambda text, here=here: show(f"{here}: {text}")))
            show(f"{here}: {size.messages} messages of stock Celery")
            stock.append(_stock(cluster, size))
    return _report(pipe, stock, size, quick=quick)


def _settings(size: Size) -> dict[str, object]:
    return {
        **NOOPS,
        "steps": size.steps,
        "batch__size": size.step_groups,
        "rollouts__group_size": GROUP_SIZE,
        "rollouts__max_in_flight": size.rollouts,
    }


def _pipe(cluster: Cluster, canary: Canary, size: Size, show: Show) -> PipeRound:
    show("starting the orchestrator")
    run = cluster.orchestrator(lag__interval_s=INTERVAL_S)
    canary.begin()
    before, started = cluster.cpu_s(), time.monotonic()
    lag = run.process.wait_until(
        lambda: _lag_when_submitted(run, size), what="every rollout is submitted", timeout_s=ROUND_S
    )
    canary_lag = canary.end()
    run.process.wait_until(lambda: _has_ended(run, size, show), what="the run has ended", timeout_s=ROUND_S)
    elapsed_s, after = time.monotonic() - started, cluster.cpu_s()
    result = audit(run.directory)
    if not result["balanced"] or result["delivered"] != size.rollouts:
        raise RunError(f"the run failed: {result}\n{run.process.output_tail}")
    cluster.kill(run.process)
    return PipeRound(
        cpu_ms={kind: 1000 * (after[kind] - before[kind]) / size.rollouts for kind in KINDS},
        rollouts_per_s=size.rollouts / elapsed_s,
        lag_p99_ms=1000 * lag["p99_s"],
        canary_p99_ms=1000 * canary_lag.p99_s,
    )


def _lag_when_submitted(run: Run, size: Size) -> dict[str, float]:
    """The orchestrator's lag (of its last 10 s at most) once all rollouts are queued, else empty."""
    status = run.status()
    all_queued = status.rollouts["planned"] >= size.rollouts and not status.waiting_jobs["rollouts"]
    return status.event_loop_lag if all_queued else {}


def _has_ended(run: Run, size: Size, show: Show) -> bool:
    show(f"{run.status().rollouts['delivered']} of {size.rollouts} rollouts delivered")
    return run.process.ended


def _stock_url(cluster: Cluster) -> str:
    return cluster.redis_url.removesuffix("/0") + "/1"


def _stock(cluster: Cluster, size: Size) -> StockRound:
    stock_celery.stage(_stock_url(cluster), size.messages)
    before = cluster.cpu_s()
    elapsed_s = stock_celery.process_staged(_stock_url(cluster))
    after = cluster.cpu_s()
    spent_s = sum(after[kind] - before[kind] for kind in ("redis", "stock worker"))
    return StockRound(cpu_ms=1000 * spent_s / size.messages, messages_per_s=size.messages / elapsed_s)


def _report(pipe: list[PipeRound], stock: list[StockRound], size: Size, *, quick: bool) -> Report:
    cpu_ms = median([each.all_cpu_ms for each in pipe])
    rollouts_per_s = median([each.rollouts_per_s for each in pipe])
    above_canary_ms = median([each.lag_p99_ms - each.canary_p99_ms for each in pipe])
    figures = {
        "rollouts a round": float(size.rollouts),
        "rollouts a second": rollouts_per_s,
        "CPU, ms a rollout": cpu_ms,
        **{f"CPU, ms a rollout: {kind}": median([each.cpu_ms[kind] for each in pipe]) for kind in KINDS},
        "orchestrator lag p99, ms": median([each.lag_p99_ms for each in pipe]),
        "canary lag p99, ms": median([each.canary_p99_ms for each in pipe]),
        "stock Celery, messages a second": median([each.messages_per_s for each in stock]),
        "stock Celery, CPU ms a message": median([each.cpu_ms for each in stock]),
        "CPU of a rollout / of a stock message": median(
            [rollout.all_cpu_ms / message.cpu_ms for rollout, message in zip(pipe, stock, strict=True)]
        ),
    }
    targets = [
        Target(name="CPU, ms a rollout", value=cpu_ms, limit=6),
        Target(name="rollouts a second", value=rollouts_per_s, limit=200, sense="at least"),
        Target(name="orchestrator lag p99 above canary's, ms", value=above_canary_ms, limit=3),
    ]
    return Report(bench="control", figures=figures, targets=targets, rounds=len(pipe), quick=quick)

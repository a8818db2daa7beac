"""`penstock bench control`: what the pipe itself costs, beside a stock Celery worker.

Rollouts that do nothing, in groups of 8, all submitted at once, go through the four queues with the ledger on disk and
task events on. CPU time is that of every process, from the moment the orchestrator begins to plan until it has ended.
"""

import time
from dataclasses import dataclass

from bench import stock_celery
from bench.canary import INTERVAL_S, Canary
from bench.cluster import Cluster, Run, cluster
from bench.progress import Say, progress
from bench.report import Report, Target, median
from orchestrator.ledger.audit import audit
from penstock.errors import RunError

ROUNDS = 5
GROUP_SIZE = 8
ROUND_S = 300.0  # some 20 s are usual
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
    """a rollout, by kind of process"""
    rollouts_per_s: float
    lag_p99_ms: float
    canary_p99_ms: float

    @property
    def all_cpu_ms(self) -> float:
        return sum(self.cpu_ms.values())


@dataclass(frozen=True, kw_only=True)
class StockRound:
    cpu_ms: float
    """a message, Redis included"""
    messages_per_s: float


def run(*, quick: bool) -> Report:
    size, rounds = (QUICK, 1) if quick else (FULL, ROUNDS)
    pipe: list[PipeRound] = []
    stock: list[StockRound] = []
    with progress("control") as say, Canary() as canary, cluster(**_settings(size)) as own:
        say("starting Redis and the workers")
        own.rollout_worker(concurrency=256)
        own.compute_worker(concurrency=COMPUTE_PROCESSES)
        own.worker("stock worker", "bench.stock_celery", ["-c", "2"], _stock_url(own))
        own.wait_ready()
        for number in range(1, rounds + 1):
            here = f"round {number} of {rounds}"
            pipe.append(_pipe(own, canary, size, lambda text, here=here: say(f"{here}: {text}")))
            say(f"{here}: {size.messages} messages of stock Celery")
            stock.append(_stock(own, size))
    return _report(pipe, stock, size, quick=quick)


def _settings(size: Size) -> dict[str, object]:
    return {
        "steps": size.steps,
        "batch__size": size.step_groups,
        "rollouts__group_size": GROUP_SIZE,
        "rollouts__max_in_flight": size.rollouts,
    }


def _pipe(own: Cluster, canary: Canary, size: Size, say: Say) -> PipeRound:
    say("starting the orchestrator")
    run = own.orchestrator(lag__interval_s=INTERVAL_S)
    canary.begin()
    before, started = own.cpu_s(), time.monotonic()
    lag = run.process.wait_until(
        lambda: _lag_when_submitted(run, size), what="every rollout is submitted", timeout_s=ROUND_S
    )
    canary_lag = canary.end()
    run.process.wait_until(lambda: _ended(run, size, say), what="the run's end", timeout_s=ROUND_S)
    elapsed_s, after = time.monotonic() - started, own.cpu_s()
    found = audit(run.directory)
    if not found["balanced"] or found["delivered"] != size.rollouts:
        raise RunError(f"the run came to a wrong end: {found}\n{run.process.last_words}")
    own.kill(run.process)
    return PipeRound(
        cpu_ms={kind: 1000 * (after[kind] - before[kind]) / size.rollouts for kind in KINDS},
        rollouts_per_s=size.rollouts / elapsed_s,
        lag_p99_ms=1000 * lag["p99_s"],
        canary_p99_ms=1000 * canary_lag.p99_s,
    )


def _lag_when_submitted(run: Run, size: Size) -> dict[str, float]:
    """Of the time since the orchestrator began, or of its sampler's last 10 s, when all its rollouts are queued."""
    status = run.status()
    all_queued = status["rollouts"]["planned"] >= size.rollouts and not status["waiting_jobs"]["rollouts"]
    return status["event_loop_lag"] if all_queued else {}


def _ended(run: Run, size: Size, say: Say) -> bool:
    say(f"{run.status()['rollouts']['delivered']} of {size.rollouts} rollouts delivered")
    return run.process.ended


def _stock_url(own: Cluster) -> str:
    return own.redis_url.removesuffix("/0") + "/1"


def _stock(own: Cluster, size: Size) -> StockRound:
    stock_celery.stage(_stock_url(own), size.messages)
    before = own.cpu_s()
    elapsed_s = stock_celery.work_off(_stock_url(own))
    after = own.cpu_s()
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
        Target(name="orchestrator lag p99 above canary's, ms", value=above_canary_ms, limit=5),
    ]
    return Report(bench="control", figures=figures, targets=targets, rounds=len(pipe), quick=quick)

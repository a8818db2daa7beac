"""`python -m bench rollout-worker`: lag and memory of a rollout worker with 256 and 1,000 rollouts.

Real Celery workers, fed with real messages, alternate in front of one engine with a latency of seconds: Headpond's, and
a baseline whose rollouts parse and decode everything (`ParseAll` in `harness/environments.py`). Each worker publishes
its lag, which is compared with that of an idle loop over the same seconds. 1,000 rollouts are more than one worker can
serve here, and responses of 25 MB exceed its byte budget: both cases measure what waiting costs.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from bench.harness.canary import INTERVAL_S, Canary
from bench.harness.cluster import Cluster, start_cluster
from bench.harness.environments import PARSED
from bench.harness.job_feed import JobFeed
from bench.harness.procfs import cpu_s, peak_mb, reset_peak, resident_mb
from bench.harness.progress import progress
from bench.harness.report import Report, Target, median
from headpond.config.engine import Engine
from headpond.event_loop.lag_summaries import LagSummary, read_summaries
from headpond.processes.child_process import ChildProcess

ROUNDS = 5
ABOVE_CANARY_MS = 15.0
CPU_MS = 4.0  # a turn of 1.3 MB
LAYERS, TOPK, COMPLETION_TOKENS = 48, 8, 120
MAX_TOKENS = 1 << 20
WAIT_S = 180.0  # time-out; 2 to 40 s are usual
AT_ONCE = 1000
BUDGET_MB = Engine().received_bytes / 1e6
OURS, PARSE_ALL = "conversation", "parse_all"
LABELS = {OURS: "ours", PARSE_ALL: "parse all"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Conversations of `turns`, each with a user message of `user_tokens`."""

    name: str
    user_tokens: int
    turns: int
    rollouts: int
    rounds: int
    environments: tuple[str, ...] = (OURS, PARSE_ALL)

    def settings(self, url: str) -> str:
        options = f"turns = {self.turns}, user_tokens = {self.user_tokens}"
        return f"""
environments.{OURS} = {{ use = "bench.harness.environments:Conversation", options = {{ {options} }} }}
environments.{PARSE_ALL} = {{ use = "bench.harness.environments:ParseAll", options = {{ {options}, url = "{url}" }} }}
"""


@dataclass(frozen=True, kw_only=True)
class Size:
    cases: tuple[Case, ...]
    latency: str
    """of the engine, in seconds"""
    publications: int
    """length of a measurement in publications of the worker's lag: one every 2 s, each of the last 10 s"""


# Bodies of 3 turns of 1,250 tokens: 0.65 to 1.95 MB, mean 1.3 MB; of 2 turns of 32,500: 17 and 33 MB, mean 25 MB.
FULL = Size(
    latency="lognormal:2.5:0.5",
    publications=5,
    cases=(
        Case(name="256 x 1.3 MB", user_tokens=1_110, turns=3, rollouts=256, rounds=ROUNDS),
        Case(name="1000 x 1.3 MB", user_tokens=1_110, turns=3, rollouts=1000, rounds=1, environments=(OURS,)),
        Case(name="64 x 25 MB", user_tokens=32_400, turns=2, rollouts=64, rounds=3, environments=(OURS,)),
    ),
)
QUICK = Size(
    latency="constant:0.5",
    publications=1,
    cases=(
        Case(name="256 x 1.3 MB", user_tokens=40, turns=2, rollouts=16, rounds=1),
        Case(name="1000 x 1.3 MB", user_tokens=40, turns=2, rollouts=32, rounds=1, environments=(OURS,)),
        Case(name="64 x 25 MB", user_tokens=400, turns=2, rollouts=8, rounds=1, environments=(OURS,)),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    lag: LagSummary
    canary_p99_ms: float
    at_once: int
    """largest number of rollouts that held a lease"""
    turns_per_s: float
    cpu_ms: float
    """of the worker, per turn"""
    grown_mb: float
    """peak memory above that of the idle worker"""

    @property
    def above_canary_ms(self) -> float:
        return 1000 * self.lag.p99_s - self.canary_p99_ms


@dataclass(frozen=True, kw_only=True)
class Side:
    """The worker of one case and environment, and the feed of its jobs."""

    cluster: Cluster
    worker: ChildProcess
    feed: JobFeed
    idle_mb: float

    def published(self) -> LagSummary | None:
        return next(
            (lag for lag in read_summaries(self.cluster.redis) if lag.process.endswith(f"-{self.worker.pid}")), None
        )


@dataclass(frozen=True, kw_only=True)
class Bench:
    canary: Canary
    sides: dict[tuple[str, str], Side]
    publications: int

    def measure(self, kind: str, case: Case) -> Measured:
        """Measure between two publications of the worker's lag, so that the last summary covers exactly that time."""
        side, at_once = self.sides[case.name, kind], 0

        def published_after(before: LagSummary | None) -> Callable[[], LagSummary | None]:
            def poll() -> LagSummary | None:
                nonlocal at_once
                side.feed.top_up(kind, case.rollouts)
                at_once = max(at_once, side.feed.running)
                lag = side.published()
                return None if lag == before else lag

            return poll

        def wait(before: LagSummary | None) -> LagSummary | None:
            return side.worker.wait_until(published_after(before), what="it has published its lag", timeout_s=WAIT_S)

        reset_peak(side.worker.pid)
        started, before_s, finished = time.monotonic(), cpu_s(side.worker.pid), side.feed.finished
        lag = wait(wait(side.published()))  # every rollout has started by the second publication
        self.canary.begin()
        for _ in range(self.publications):
            lag = wait(lag)
        assert lag is not None
        canary = self.canary.end()
        side.worker.wait_until(side.feed.drained, what="the last rollouts have ended", timeout_s=WAIT_S)
        turns = case.turns * (side.feed.finished - finished)
        return Measured(
            lag=lag,
            canary_p99_ms=1000 * canary.p99_s,
            at_once=at_once,
            turns_per_s=turns / (time.monotonic() - started),
            cpu_ms=1000 * (cpu_s(side.worker.pid) - before_s) / turns,
            grown_mb=peak_mb(side.worker.pid) - side.idle_mb,
        )


def run(*, quick: bool) -> Report:
    size = QUICK if quick else FULL
    measured: dict[tuple[str, str], list[Measured]] = {}
    with ExitStack() as stack, progress("rollout-worker") as show:
        show("starting an engine and the workers")
        bench = stack.enter_context(ready(size))
        for number in range(ROUNDS):
            for case in size.cases:
                for kind in case.environments if number < case.rounds else ():
                    show(f"round {number + 1} of {case.rounds}: {case.name}, {kind}")
                    measured.setdefault((case.name, kind), []).append(bench.measure(kind, case))
    return _report(measured, quick=quick)


@contextmanager
def ready(size: Size) -> Iterator[Bench]:
    """Each case has its own workers, because a process does not return the memory it has used."""
    with ExitStack() as stack:
        canary, shared = stack.enter_context(Canary()), stack.enter_context(start_cluster())
        url = engine(shared, size.latency)
        started = {
            (case, kind): start(stack.enter_context(start_cluster(lag__interval_s=INTERVAL_S)), case, url)
            for case in size.cases
            for kind in case.environments
        }
        for cluster, _ in started.values():
            cluster.wait_ready()
        sides = {(case.name, kind): _side(kind, *worker) for (case, kind), worker in started.items()}
        yield Bench(canary=canary, sides=sides, publications=size.publications)


def engine(shared: Cluster, latency: str) -> str:
    experts = ["--layers", str(LAYERS), "--topk", str(TOPK), "--form", "object"]
    completions = ["--length", f"constant:{COMPLETION_TOKENS}", "--max-model-len", str(MAX_TOKENS)]
    return shared.engine(*experts, *completions, "--latency", latency)


def start(
    cluster: Cluster, case: Case, url: str, *, app: str = "headpond.workers.rollouts"
) -> tuple[Cluster, ChildProcess]:
    settings = f'engine.urls = ["{url}"]\nengine.routed_experts = true\npolicy.max_seq_len = {MAX_TOKENS}\n'
    cluster.configure(settings + case.settings(url))
    return cluster, cluster.worker("rollout worker", app, ["-Q", "rollouts", "-c", str(case.rollouts)])


def _side(kind: str, cluster: Cluster, worker: ChildProcess) -> Side:
    feed = JobFeed(cluster=cluster, policy_error=PARSED if kind == PARSE_ALL else None)
    return Side(cluster=cluster, worker=worker, feed=feed, idle_mb=resident_mb(worker.pid))


def _report(measured: dict[tuple[str, str], list[Measured]], *, quick: bool) -> Report:
    figures: dict[str, float] = {"byte budget, MB": BUDGET_MB}
    for (case, kind), rounds in measured.items():
        name = f"{case}, {LABELS[kind]}"
        figures |= {f"{name}: {what}": value for what, value in _figures(rounds).items()}
    ours = {case: rounds for (case, kind), rounds in measured.items() if kind == OURS}
    few, many = (next(rounds for case, rounds in ours.items() if case.startswith(at)) for at in ("256", "1000"))
    cpu_ms = median([each.cpu_ms for each in few])
    targets = [
        *(
            Target(
                name=f"{case}: p99 above canary's, ms",
                value=median([each.above_canary_ms for each in rounds]),
                limit=ABOVE_CANARY_MS,
            )
            for case, rounds in ours.items()
            if rounds is not many
        ),
        Target(name="256 x 1.3 MB: worker's CPU ms a turn", value=cpu_ms, limit=CPU_MS),
        Target(name="rollouts at once", value=max(each.at_once for each in many), limit=AT_ONCE, sense="at least"),
        *(
            Target(
                name=f"{case}: memory / byte budget", value=max(each.grown_mb for each in rounds) / BUDGET_MB, limit=1
            )
            for case, rounds in ours.items()
        ),
    ]
    return Report(bench="rollout-worker", figures=figures, targets=targets, rounds=len(few), quick=quick)


def _figures(rounds: list[Measured]) -> dict[str, float]:
    return {
        "rollouts at once, most": max(each.at_once for each in rounds),
        "turns a second": median([each.turns_per_s for each in rounds]),
        "worker's CPU ms a turn": median([each.cpu_ms for each in rounds]),
        "loop's lag p50, ms": 1000 * median([each.lag.median_s for each in rounds]),
        "loop's lag p99, ms": 1000 * median([each.lag.p99_s for each in rounds]),
        "loop's lag max, ms": 1000 * median([each.lag.max_s for each in rounds]),
        "canary's lag p99, ms": median([each.canary_p99_ms for each in rounds]),
        "p99 above canary's, ms": median([each.above_canary_ms for each in rounds]),
        "loop's share of a core": median([each.lag.cpu_share for each in rounds]),
        "memory above idle, MB, most": max(each.grown_mb for each in rounds),
    }

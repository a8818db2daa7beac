"""`penstock bench rollout-worker`: how late a worker's loop runs with 256 and 1,000 rollouts, and what memory it takes.

Real Celery workers take turns, fed with real messages, in front of one engine that takes seconds for an answer, as they
do: Penstock's, and one whose rollouts parse and decode everything (`parse_all.py`). Lag is what each worker publishes
itself, beside an idle loop's of the same seconds. 1,000 rollouts are more than one worker keeps up with here, answers
of 25 MB more than its byte budget holds: both show what it costs to let them wait.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from bench.canary import INTERVAL_S, Canary
from bench.cluster import Cluster, cluster
from bench.cpu import cpu_s
from bench.feed import Feed
from bench.memory import forget_peak, peak_mb, resident_mb
from bench.parse_all import DONE
from bench.processes import Process
from bench.progress import progress
from bench.report import Report, Target, median
from penstock.config.engine import Engine
from penstock.runtime.loop_lag import LagSummary, read_summaries

ROUNDS = 5
ABOVE_CANARY_MS = 15.0
LAYERS, TOPK, ANSWERED = 48, 8, 120
MOST_TOKENS = 1 << 20
WAIT_S = 180.0  # for what takes 2 to 40 s
AT_ONCE = 1000
BUDGET_MB = Engine().received_bytes / 1e6
OURS, PARSE_ALL = "talk", "parse_all"
LABELS = {OURS: "ours", PARSE_ALL: "parse all"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Conversations of `turns`, in each of which the user says `said` tokens."""

    name: str
    said: int
    turns: int
    rollouts: int
    rounds: int
    environments: tuple[str, ...] = (OURS, PARSE_ALL)

    def settings(self, url: str) -> str:
        talk = f"turns = {self.turns}, said = {self.said}"
        return f"""
environments.{OURS} = {{ use = "bench.talk:Talk", options = {{ {talk} }} }}
environments.{PARSE_ALL} = {{ use = "bench.parse_all:ParseAll", options = {{ {talk}, url = "{url}" }} }}
"""


@dataclass(frozen=True, kw_only=True)
class Size:
    cases: tuple[Case, ...]
    latency: str
    """of the engine, s"""
    publications: int
    """of the worker's lag that a measurement lasts: one every 2 s, each of the last 10 s"""


# 3 turns of 1,250 tokens: 0.65 to 1.95 MB, 1.3 MB in the mean; 2 turns of 32,500: 17 and 33 MB, 25 MB in the mean.
FULL = Size(
    latency="lognormal:2.5:0.5",
    publications=5,
    cases=(
        Case(name="256 x 1.3 MB", said=1_110, turns=3, rollouts=256, rounds=ROUNDS),
        Case(name="1000 x 1.3 MB", said=1_110, turns=3, rollouts=1000, rounds=1, environments=(OURS,)),
        Case(name="64 x 25 MB", said=32_400, turns=2, rollouts=64, rounds=1, environments=(OURS,)),
    ),
)
QUICK = Size(
    latency="constant:0.5",
    publications=1,
    cases=(
        Case(name="256 x 1.3 MB", said=40, turns=2, rollouts=16, rounds=1),
        Case(name="1000 x 1.3 MB", said=40, turns=2, rollouts=32, rounds=1, environments=(OURS,)),
        Case(name="64 x 25 MB", said=400, turns=2, rollouts=8, rounds=1, environments=(OURS,)),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    lag: LagSummary
    canary_p99_ms: float
    at_once: int
    """rollouts that held a lease, the most"""
    turns_per_s: float
    cpu_ms: float
    """of the worker, a turn"""
    grown_mb: float
    """the most memory, above that of the idle worker"""

    @property
    def above_canary_ms(self) -> float:
        return 1000 * self.lag.p99_s - self.canary_p99_ms


@dataclass(frozen=True, kw_only=True)
class Side:
    """A worker that plays one case, by one kind of environment, and what feeds it."""

    cluster: Cluster
    worker: Process
    feed: Feed
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
        """From one publication of the worker's lag to another, whose summary is of just that time."""
        side, at_once = self.sides[case.name, kind], 0

        def published_after(before: LagSummary | None) -> Callable[[], LagSummary | None]:
            def look() -> LagSummary | None:
                nonlocal at_once
                side.feed.keep(kind, case.rollouts)
                at_once = max(at_once, side.feed.running)
                found = side.published()
                return None if found == before else found

            return look

        def wait(before: LagSummary | None) -> LagSummary | None:
            return side.worker.wait_until(published_after(before), what="it publishes its lag", timeout_s=WAIT_S)

        forget_peak(side.worker.pid)
        started, before_s, finished = time.monotonic(), cpu_s(side.worker.pid), side.feed.finished
        lag = wait(wait(side.published()))  # all have begun when the second is out
        self.canary.begin()
        for _ in range(self.publications):
            lag = wait(lag)
        assert lag is not None
        canary = self.canary.end()
        side.worker.wait_until(side.feed.drained, what="the last rollouts end", timeout_s=WAIT_S)
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
    found: dict[tuple[str, str], list[Measured]] = {}
    with ExitStack() as stack, progress("rollout-worker") as say:
        say("starting an engine and the workers")
        bench = stack.enter_context(ready(size))
        for number in range(ROUNDS):
            for case in size.cases:
                for kind in case.environments if number < case.rounds else ():
                    say(f"round {number + 1} of {case.rounds}: {case.name}, {kind}")
                    found.setdefault((case.name, kind), []).append(bench.measure(kind, case))
    return _report(found, quick=quick)


@contextmanager
def ready(size: Size) -> Iterator[Bench]:
    """Each case has workers of its own: memory that a process has once used it keeps."""
    with ExitStack() as stack:
        canary, shared = stack.enter_context(Canary()), stack.enter_context(cluster())
        url = engine(shared, size.latency)
        started = {
            (case, kind): start(stack.enter_context(cluster(lag__interval_s=INTERVAL_S)), case, url)
            for case in size.cases
            for kind in case.environments
        }
        for own, _ in started.values():
            own.wait_ready()
        sides = {(case.name, kind): _side(kind, *own) for (case, kind), own in started.items()}
        yield Bench(canary=canary, sides=sides, publications=size.publications)


def engine(shared: Cluster, latency: str) -> str:
    routes = ["--layers", str(LAYERS), "--topk", str(TOPK), "--form", "object"]
    answers = ["--length", f"constant:{ANSWERED}", "--latency", latency, "--max-model-len", str(MOST_TOKENS)]
    return shared.engine(*routes, *answers)


def start(own: Cluster, case: Case, url: str, *, app: str = "workers.rollouts") -> tuple[Cluster, Process]:
    settings = f'engine.urls = ["{url}"]\nengine.routed_experts = true\npolicy.max_seq_len = {MOST_TOKENS}\n'
    own.configure(settings + case.settings(url))
    return own, own.worker("rollout worker", app, ["-Q", "rollouts", "-c", str(case.rollouts)])


def _side(kind: str, own: Cluster, worker: Process) -> Side:
    feed = Feed(cluster=own, policy_error=DONE if kind == PARSE_ALL else None)
    return Side(cluster=own, worker=worker, feed=feed, idle_mb=resident_mb(worker.pid))


def _report(found: dict[tuple[str, str], list[Measured]], *, quick: bool) -> Report:
    figures: dict[str, float] = {"byte budget, MB": BUDGET_MB}
    for (case, kind), rounds in found.items():
        name = f"{case}, {LABELS[kind]}"
        figures |= {f"{name}: {what}": value for what, value in _figures(rounds).items()}
    ours = {case: rounds for (case, kind), rounds in found.items() if kind == OURS}
    few, many = (next(rounds for case, rounds in ours.items() if case.startswith(at)) for at in ("256", "1000"))
    above_ms = median([each.above_canary_ms for each in few])
    targets = [
        Target(name="256 x 1.3 MB: p99 above canary's, ms", value=above_ms, limit=ABOVE_CANARY_MS),
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

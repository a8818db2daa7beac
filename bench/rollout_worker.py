"""`penstock bench rollout-worker`: how late a worker's loop runs with 256 and 1,000 rollouts, and what memory it takes.

Two real Celery workers take turns, fed with real messages, in front of one engine: Penstock's, and one whose rollouts
parse and decode everything (`parse_all.py`). Lag is what each worker itself publishes, beside an idle loop's of the
same seconds. Bodies of 25 MB are more at once than the byte budget holds.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from bench.canary import INTERVAL_S, Canary
from bench.cluster import Cluster, cluster
from bench.cpu import cpu_s
from bench.feed import Feed
from bench.memory import forget_peak, peak_mb, resident_mb
from bench.parse_all import DONE
from bench.pipeline import READY
from bench.processes import Process
from bench.progress import progress
from bench.report import Report, Target, median
from penstock.loop_lag import LagSummary, read_all
from penstock.rollout_config import Engine

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
        """Each kind of environment under a name of the case's own."""
        talk = f"turns = {self.turns}, said = {self.said}"
        return f"""
environments.{OURS}{self.rollouts} = {{ use = "bench.talk:Talk", options = {{ {talk} }} }}
environments.{PARSE_ALL}{self.rollouts} = {{ use = "bench.parse_all:ParseAll", options = {{ {talk}, url = "{url}" }} }}
"""


@dataclass(frozen=True, kw_only=True)
class Size:
    cases: tuple[Case, ...]
    publications: int
    """of the worker's lag that a measurement lasts: one every 2 s, each of the last 10 s"""


# 4 turns of 1,000 tokens: 0.5 to 2 MB, 1.3 MB in the mean; 2 turns of 32,500: 17 and 33 MB, 25 MB in the mean.
FULL = Size(
    publications=5,
    cases=(
        Case(name="256 x 1.3 MB", said=860, turns=4, rollouts=256, rounds=ROUNDS),
        Case(name="1000 x 1.3 MB", said=860, turns=4, rollouts=1000, rounds=2, environments=(OURS,)),
        Case(name="64 x 25 MB", said=32_400, turns=2, rollouts=64, rounds=1, environments=(OURS,)),
    ),
)
QUICK = Size(
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
    """A worker that plays one kind of environment, and what feeds it."""

    cluster: Cluster
    worker: Process
    feed: Feed
    idle_mb: float

    def published(self) -> LagSummary | None:
        return next((lag for lag in read_all(self.cluster.redis) if lag.process.endswith(f"-{self.worker.pid}")), None)


@dataclass(frozen=True, kw_only=True)
class Bench:
    canary: Canary
    sides: dict[str, Side]
    publications: int

    def measure(self, kind: str, case: Case) -> Measured:
        """From one publication of the worker's lag to another, whose summary is of just that time."""
        side, at_once = self.sides[kind], 0

        def published_after(before: LagSummary | None) -> Callable[[], LagSummary | None]:
            def look() -> LagSummary | None:
                nonlocal at_once
                side.feed.keep(f"{kind}{case.rollouts}", case.rollouts)
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
        say("starting an engine and two workers")
        bench = stack.enter_context(ready(size))
        for number in range(ROUNDS):
            for case in size.cases:
                for kind in case.environments if number < case.rounds else ():
                    say(f"round {number + 1} of {case.rounds}: {case.name}, {kind}")
                    found.setdefault((case.name, kind), []).append(bench.measure(kind, case))
    return _report(found, quick=quick)


@contextmanager
def ready(size: Size) -> Iterator[Bench]:
    with Canary() as canary, _cluster() as ours, _cluster() as other:
        routes = ["--layers", str(LAYERS), "--topk", str(TOPK), "--form", "object"]
        length = ["--length", f"constant:{ANSWERED}", "--max-model-len", str(MOST_TOKENS)]
        engine = ours.start("engine", "penstock", "engine", "--port", "0", *routes, *length)
        found = engine.wait_until(lambda: READY.search(engine.output), what="it listens", timeout_s=WAIT_S)
        assert found is not None
        shared = f'engine.urls = ["{found[1]}"]\nengine.routed_experts = true\npolicy.max_seq_len = {MOST_TOKENS}\n'
        most = max(case.rollouts for case in size.cases)
        workers: list[Process] = []
        for each in (ours, other):
            each.configure(shared + "".join(case.settings(found[1]) for case in size.cases))
            workers.append(each.rollout_worker(concurrency=most))
        for each in (ours, other):
            each.wait_ready()
        sides = {
            kind: Side(
                cluster=each,
                worker=worker,
                feed=Feed(cluster=each, policy_error=error),
                idle_mb=resident_mb(worker.pid),
            )
            for kind, each, worker, error in zip((OURS, PARSE_ALL), (ours, other), workers, (None, DONE), strict=True)
        }
        yield Bench(canary=canary, sides=sides, publications=size.publications)


def _cluster() -> AbstractContextManager[Cluster]:
    return cluster(lag__interval_s=INTERVAL_S)


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

"""`python -m bench turn`: where the CPU time of a rollout worker's turn goes, with responses of 1.3 MB and of 25 MB.

Plays rollouts that are all started at once in a worker whose functions are timed (`harness/section_timer.py`). Sizes
alternate; figures are medians over rounds. There is no baseline and no target: `bench rollout-worker` has them.
"""

import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.harness.cluster import start_cluster
from bench.harness.job_feed import JobFeed
from bench.harness.progress import progress
from bench.harness.report import Report, median
from bench.harness.section_timer import FILE
from bench.rollout_worker import FULL, OURS, QUICK, Case, engine, start
from headpond.processes.child_process import ChildProcess

ROUNDS = 3
LATENCY = "constant:0.2"
PLAY_S = 300.0  # time-out; a few seconds are usual
ROLLOUTS = {"1.3 MB": 64, "25 MB": 8}
SMALL, LARGE = FULL.cases[0], FULL.cases[2]


@dataclass(frozen=True, kw_only=True)
class Side:
    """The worker of one size, and the feed of its jobs."""

    case: Case
    worker: ChildProcess
    feed: JobFeed
    profile: Path

    def play(self) -> dict[str, Any]:
        """One round: its profile."""
        self.profile.unlink(missing_ok=True)
        self.feed.top_up(OURS, self.case.rollouts)
        self.worker.wait_until(self.feed.drained, what="the last rollout has ended", timeout_s=PLAY_S)
        self.worker.wait_until(self.profile.exists, what="the profile is written", timeout_s=PLAY_S)
        return json.loads(self.profile.read_text())


def run(*, quick: bool) -> Report:
    rounds: dict[str, list[dict[str, float]]] = {}
    with ExitStack() as stack, progress("turn") as show:
        show("starting an engine and the workers")
        sides = {name: _side(stack, case) for name, case in _cases(quick=quick).items()}
        for number in range(1 if quick else 1 + ROUNDS):  # the first is warm-up
            for name, side in sides.items():
                show(f"round {number}: {name}")
                rounds.setdefault(name, []).append(_figures(side.case, side.play()))
    figures = {
        f"{name}: {what}": median([each.get(what, 0.0) for each in of_size[-ROUNDS:]])
        for name, of_size in rounds.items()
        for what in sorted({what for each in of_size for what in each})
    }
    return Report(bench="turn", figures=figures, targets=[], rounds=1 if quick else ROUNDS, quick=quick)


def _cases(*, quick: bool) -> dict[str, Case]:
    if quick:
        return {"1.3 MB": replace(QUICK.cases[0], rollouts=4)}
    return {name: replace(case, rollouts=ROLLOUTS[name]) for name, case in (("1.3 MB", SMALL), ("25 MB", LARGE))}


def _side(stack: ExitStack, case: Case) -> Side:
    cluster = stack.enter_context(start_cluster())
    _, worker = start(cluster, case, engine(cluster, LATENCY), app="bench.harness.profiled_worker")
    cluster.wait_ready()
    return Side(case=case, worker=worker, feed=JobFeed(cluster=cluster), profile=cluster.directory / FILE)


def _figures(case: Case, profile: dict[str, Any]) -> dict[str, float]:
    """Milliseconds a turn; those of starts and ends are shared by a rollout's turns."""
    turns = case.turns * profile["rollouts"]
    of_threads = {kind: (1000 * ran / turns, user, kernel) for kind, (ran, user, kernel) in profile["threads"].items()}
    whole = sum(ran for ran, *_ in of_threads.values())
    figures: dict[str, float] = {"CPU ms a turn": whole}
    for kind, (ran, user, kernel) in of_threads.items():
        figures |= {f"{kind}, ms": ran, f"{kind}, in the kernel": kernel / ((user + kernel) or 1)}
    for name, spent in profile["sections"].items():
        figures[f"{name}, ms"] = 1000 * spent / turns
    figures["in no named function, ms"] = whole - 1000 * sum(profile["sections"].values()) / turns
    return figures

"""`python -m bench steps`: CPU time of each step of a rollout worker's loop, with 256 and 1,000 rollouts.

Plays the rollouts of `bench rollout-worker`, all started at once. The worker runs on a loop that times its steps and
garbage collections (`harness/step_timer.py`). There is no baseline: the target is a share of steps over 1 ms.
"""

import json
from collections import Counter
from typing import Any

import numpy as np

from bench.harness.cluster import Cluster, start_cluster
from bench.harness.job_feed import JobFeed
from bench.harness.progress import Show, progress
from bench.harness.report import Report, Target
from bench.harness.step_timer import FILE, LONG_S
from bench.rollout_worker import FULL, OURS, QUICK, Case, engine, start

LONG, LONG_SHARE = "share of steps over 1 ms", 0.002  # any step may hit cold caches and new pages
PLAY_S, END_S = 300.0, 60.0  # time-outs; about 30 s and 2 s are usual
NAMES_SHOWN = 6


def run(*, quick: bool) -> Report:
    size = QUICK if quick else FULL
    figures: dict[str, float] = {}
    targets: list[Target] = []
    with progress("steps") as show:
        for case in size.cases[:1] if quick else size.cases[:2]:
            with start_cluster() as cluster:
                measured = _figures(_play(cluster, case, engine(cluster, size.latency), show))
            figures |= {f"{case.rollouts} rollouts: {name}": value for name, value in measured.items()}
            targets.append(Target(name=f"{case.rollouts} rollouts: {LONG}", value=measured[LONG], limit=LONG_SHARE))
    return Report(bench="steps", figures=figures, targets=targets, rounds=1, quick=quick)


def _figures(timings: dict[str, Any]) -> dict[str, float]:
    steps_ms, stops_ms = 1000 * np.array(timings["cpu_s"]), 1000 * np.array(timings["collections_s"] or [0.0])
    return {
        "steps": float(len(steps_ms)),
        LONG: float((steps_ms > 1000 * LONG_S).mean()),
        "a step's CPU p99, ms": float(np.quantile(steps_ms, 0.99)),
        "the longest, ms": float(steps_ms.max()),
        **{
            f"over 1 ms: {name}": float(steps) for name, steps in Counter[str](timings["long"]).most_common(NAMES_SHOWN)
        },
        "stops for the collector": float(len(stops_ms)),
        "a stop's CPU p99, ms": float(np.quantile(stops_ms, 0.99)),
        "the longest stop, ms": float(stops_ms.max()),
    }


def _play(cluster: Cluster, case: Case, url: str, show: Show) -> dict[str, Any]:
    show(f"{case.rollouts} rollouts: starting a worker")
    _, worker = start(cluster, case, url, app="bench.harness.timed_worker")
    cluster.wait_ready()
    feed = JobFeed(cluster=cluster)
    feed.top_up(OURS, case.rollouts)

    def drained() -> bool:
        show(f"{case.rollouts} rollouts: {feed.finished} have ended")
        return feed.drained()

    worker.wait_until(drained, what="the last rollout has ended", timeout_s=PLAY_S)
    worker.terminate()
    worker.wait_until(lambda: worker.ended, what="it has ended", timeout_s=END_S)
    return json.loads((cluster.directory / FILE).read_text())

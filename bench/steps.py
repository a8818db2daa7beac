"""`penstock bench steps`: how long a rollout worker keeps its loop at a time, with 256 and 1,000 rollouts.

The rollouts of `bench rollout-worker`, all begun at once and played to their end; then the worker says how much CPU
time each step of its loop took (`loop_steps.py`), and each stop for the garbage collector.
"""

import json
from collections import Counter
from typing import Any

import numpy as np

from bench.cluster import Cluster, cluster
from bench.feed import Feed
from bench.loop_steps import FILE, LONG_S
from bench.progress import Say, progress
from bench.report import Report, Target
from bench.rollout_worker import FULL, OURS, QUICK, Case, engine, start

LONG, LONG_SHARE = "share of steps over 1 ms", 0.002  # some of any kind meet cold caches and new pages
PLAY_S, END_S = 300.0, 60.0  # some 30 s and 2 s are usual
NAMED = 6


def run(*, quick: bool) -> Report:
    size = QUICK if quick else FULL
    figures: dict[str, float] = {}
    targets: list[Target] = []
    with progress("steps") as say:
        for case in size.cases[:1] if quick else size.cases[:2]:
            with cluster() as own:
                seen = _figures(_play(own, case, engine(own, size.latency), say))
            figures |= {f"{case.rollouts} rollouts: {name}": value for name, value in seen.items()}
            targets.append(Target(name=f"{case.rollouts} rollouts: {LONG}", value=seen[LONG], limit=LONG_SHARE))
    return Report(bench="steps", figures=figures, targets=targets, rounds=1, quick=quick)


def _figures(seen: dict[str, Any]) -> dict[str, float]:
    steps_ms, stops_ms = 1000 * np.array(seen["cpu_s"]), 1000 * np.array(seen["collections_s"] or [0.0])
    return {
        "steps": float(len(steps_ms)),
        LONG: float((steps_ms > 1000 * LONG_S).mean()),
        "a step's CPU p99, ms": float(np.quantile(steps_ms, 0.99)),
        "the longest, ms": float(steps_ms.max()),
        **{f"over 1 ms: {name}": float(steps) for name, steps in Counter[str](seen["long"]).most_common(NAMED)},
        "stops for the collector": float(len(stops_ms)),
        "a stop's CPU p99, ms": float(np.quantile(stops_ms, 0.99)),
        "the longest stop, ms": float(stops_ms.max()),
    }


def _play(own: Cluster, case: Case, url: str, say: Say) -> dict[str, Any]:
    say(f"{case.rollouts} rollouts: starting a worker")
    _, worker = start(own, case, url, app="bench.timed_worker")
    own.wait_ready()
    feed = Feed(cluster=own)
    feed.keep(OURS, case.rollouts)

    def drained() -> bool:
        say(f"{case.rollouts} rollouts: {feed.finished} have ended")
        return feed.drained()

    worker.wait_until(drained, what="the last rollout ends", timeout_s=PLAY_S)
    worker.terminate()
    worker.wait_until(lambda: worker.ended, what="it ends", timeout_s=END_S)
    return json.loads((own.directory / FILE).read_text())

"""`penstock bench soak`: 20,000 short rollouts through one worker process leave nothing behind.

Every tenth request to the engine fails at first, in all the ways that an engine can fail: retries, broken connections
and malformed answers are part of it. What the worker holds is counted when it has been idle for a while, before and
after.
"""

import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from celery import Celery

from bench.cluster import Cluster, cluster
from bench.feed import Feed
from bench.memory import resident_mb
from bench.processes import Process
from bench.progress import Say, progress
from bench.report import Report, Target
from penstock.errors import RunError
from tasks.celery_app import CONTENT_TYPE

AT_ONCE = 64
FAILURES = "error=0.04,malformed=0.03,disconnect=0.03"
ROLLOUTS_S = 1_800.0
REST_S = 6.0  # idle connections go after 4 s, leases and events within one
LOOK_S, ANSWER_S = 0.5, 10.0
GROWTH_KB = 0.5
"""A rollout: whatever is kept of each, be it one small object with its dict, is more. A leaked session is 20 kB."""


@dataclass(frozen=True, kw_only=True)
class Size:
    warm_up: int
    """until then pools fill, caches too, and memory is touched for the first time"""
    rollouts: int


FULL = Size(warm_up=4_000, rollouts=20_000)
QUICK = Size(warm_up=100, rollouts=300)


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a worker holds when it is idle."""

    descriptors: int
    threads: int
    children: int
    tasks: int
    """of its event loop"""
    rollouts: int
    """that it believes to be running, or leaving"""


def run(*, quick: bool) -> Report:
    size = QUICK if quick else FULL
    with progress("soak") as say, cluster() as own:
        say("starting an engine and a worker")
        worker = _worker(own)
        feed = Feed(cluster=own)
        _play(feed, worker, size.warm_up, say)
        before, before_mb = _held(own, worker.pid), resident_mb(worker.pid)
        _play(feed, worker, size.rollouts, say)
        after, after_mb = _held(own, worker.pid), resident_mb(worker.pid)
    return _report(size, before, after, (before_mb, after_mb), quick=quick)


def _worker(own: Cluster) -> Process:
    what = ["--layers", "4", "--topk", "2", "--length", "constant:20", "--failures", FAILURES]
    own.configure(f"""
engine.urls = ["{own.engine(*what)}"]
engine.routed_experts = true
engine.retries = 20
engine.retry_first_s = 0.01
environments.talk.use = "bench.talk:Talk"
environments.talk.options = {{ turns = 2, said = 40 }}
""")
    worker = own.rollout_worker(concurrency=AT_ONCE)
    own.wait_ready()
    return worker


def _play(feed: Feed, worker: Process, until: int, say: Say) -> None:
    def done() -> bool:
        say(f"{feed.finished} rollouts, the worker has {resident_mb(worker.pid):.1f} MB")
        feed.keep("talk", min(AT_ONCE, until - feed.finished))
        return feed.finished == until

    worker.wait_until(done, what=f"{until} rollouts have ended", timeout_s=ROLLOUTS_S)


def _held(own: Cluster, pid: int) -> Held:
    """When nothing has gone any more for a while: what is held for a reason stays."""
    held, since = _look(own, pid), time.monotonic()
    while time.monotonic() - since < REST_S:
        time.sleep(LOOK_S)
        now = _look(own, pid)
        if now != held:
            held, since = now, time.monotonic()
    return held


def _look(own: Cluster, pid: int) -> Held:
    asking = Celery(broker=own.redis_url, accept_content=["json", CONTENT_TYPE]).control.inspect(
        timeout=ANSWER_S, limit=1
    )
    answers: dict[str, Any] = asking.stats() or {}
    if not answers:
        raise RunError(f"the worker did not answer within {ANSWER_S:g} s")
    (stats,) = answers.values()
    pool = stats["pool"]
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    return Held(
        descriptors=len(list(Path(f"/proc/{pid}/fd").iterdir())),
        threads=len(tasks),
        children=sum(len((task / "children").read_text().split()) for task in tasks),
        tasks=pool["tasks"],
        rollouts=pool["active"] + pool["leaving"],
    )


def _report(size: Size, before: Held, after: Held, resident: tuple[float, float], *, quick: bool) -> Report:
    grown_kb = 1000 * (resident[1] - resident[0]) / (size.rollouts - size.warm_up)
    names = [field.name for field in fields(Held)]
    figures = {
        "rollouts": float(size.rollouts),
        "of which before the first count": float(size.warm_up),
        "memory before, MB": resident[0],
        "memory after, MB": resident[1],
        **{f"{name} before": float(getattr(before, name)) for name in names},
        **{f"{name} after": float(getattr(after, name)) for name in names},
    }
    targets = [
        *(Target(name=f"{name} more", value=getattr(after, name) - getattr(before, name), limit=0) for name in names),
        Target(name="memory, kB more a rollout", value=grown_kb, limit=GROWTH_KB),
    ]
    return Report(bench="soak", figures=figures, targets=targets, rounds=1, quick=quick)

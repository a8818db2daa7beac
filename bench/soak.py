"""`python -m bench soak`: resources that one worker process leaks over 20,000 short rollouts.

One request in ten fails at first (HTTP error, malformed response, broken connection) and is retried. Descriptors,
threads, children, tasks and memory of the idle worker are counted before and after.
"""

import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from celery import Celery

from bench.harness.cluster import Cluster, start_cluster
from bench.harness.job_feed import JobFeed
from bench.harness.procfs import resident_mb
from bench.harness.progress import Show, progress
from bench.harness.report import Report, Target
from headpond.errors import RunError
from headpond.event_loop.offload import FILE_THREADS
from headpond.processes.child_process import ChildProcess
from headpond.tasks.celery_app import CONTENT_TYPE

AT_ONCE = 64
FAILURES = "error=0.04,malformed=0.03,disconnect=0.03"
ROLLOUTS_S = 1_800.0
SETTLED_S = 6.0  # idle connections close after 4 s, leases and events end within 1 s
POLL_S, REPLY_S = 0.5, 10.0
GROWTH_KB = 0.5
"""per rollout; less than one small leaked object with its dict. A leaked session is 20 kB."""

MORE = {"threads": FILE_THREADS - 1}
"""what may be more: further threads for files start when one is slow"""


@dataclass(frozen=True, kw_only=True)
class Size:
    warm_up: int
    """rollouts until pools and caches are full and memory has been touched for the first time"""
    rollouts: int


FULL = Size(warm_up=4_000, rollouts=20_000)
QUICK = Size(warm_up=100, rollouts=300)


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources of an idle worker."""

    descriptors: int
    threads: int
    children: int
    tasks: int
    """on its event loop"""
    rollouts: int
    """running or ending, by the worker's own count"""


def run(*, quick: bool) -> Report:
    size = QUICK if quick else FULL
    with progress("soak") as show, start_cluster() as cluster:
        show("starting an engine and a worker")
        worker = _worker(cluster)
        feed = JobFeed(cluster=cluster)
        _play(feed, worker, size.warm_up, show)
        before, before_mb = _resources_when_idle(cluster, worker.pid), resident_mb(worker.pid)
        _play(feed, worker, size.rollouts, show)
        after, after_mb = _resources_when_idle(cluster, worker.pid), resident_mb(worker.pid)
    return _report(size, before, after, (before_mb, after_mb), quick=quick)


def _worker(cluster: Cluster) -> ChildProcess:
    options = ["--layers", "4", "--topk", "2", "--length", "constant:20", "--failures", FAILURES]
    cluster.configure(f"""
engine.urls = ["{cluster.engine(*options)}"]
engine.routed_experts = true
engine.retries = 20
engine.retry_first_s = 0.01
environments.conversation.use = "bench.harness.environments:Conversation"
environments.conversation.options = {{ turns = 2, user_tokens = 40 }}
""")
    worker = cluster.rollout_worker(concurrency=AT_ONCE)
    cluster.wait_ready()
    return worker


def _play(feed: JobFeed, worker: ChildProcess, until: int, show: Show) -> None:
    def done() -> bool:
        show(f"{feed.finished} rollouts, the worker has {resident_mb(worker.pid):.1f} MB")
        feed.top_up("conversation", min(AT_ONCE, until - feed.finished))
        return feed.finished == until

    worker.wait_until(done, what=f"{until} rollouts have ended", timeout_s=ROLLOUTS_S)


def _resources_when_idle(cluster: Cluster, pid: int) -> Resources:
    """Resources once they have not changed for SETTLED_S."""
    resources, since = _resources(cluster, pid), time.monotonic()
    while time.monotonic() - since < SETTLED_S:
        time.sleep(POLL_S)
        now = _resources(cluster, pid)
        if now != resources:
            resources, since = now, time.monotonic()
    return resources


def _resources(cluster: Cluster, pid: int) -> Resources:
    inspect = Celery(broker=cluster.redis_url, accept_content=["json", CONTENT_TYPE]).control.inspect(
        timeout=REPLY_S, limit=1
    )
    replies: dict[str, Any] = inspect.stats() or {}
    if not replies:
        raise RunError(f"the worker did not reply within {REPLY_S:g} s")
    (stats,) = replies.values()
    pool = stats["pool"]
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    return Resources(
        descriptors=len(list(Path(f"/proc/{pid}/fd").iterdir())),
        threads=len(tasks),
        children=sum(len((task / "children").read_text().split()) for task in tasks),
        tasks=pool["tasks"],
        rollouts=pool["active"] + pool["leaving"],
    )


def _report(size: Size, before: Resources, after: Resources, resident: tuple[float, float], *, quick: bool) -> Report:
    grown_kb = 1000 * (resident[1] - resident[0]) / (size.rollouts - size.warm_up)
    names = [field.name for field in fields(Resources)]
    figures = {
        "rollouts": float(size.rollouts),
        "of which before the first count": float(size.warm_up),
        "memory before, MB": resident[0],
        "memory after, MB": resident[1],
        **{f"{name} before": float(getattr(before, name)) for name in names},
        **{f"{name} after": float(getattr(after, name)) for name in names},
    }
    targets = [
        *(
            Target(name=f"{name} more", value=getattr(after, name) - getattr(before, name), limit=MORE.get(name, 0))
            for name in names
        ),
        Target(name="memory, kB more a rollout", value=grown_kb, limit=GROWTH_KB),
    ]
    return Report(bench="soak", figures=figures, targets=targets, rounds=1, quick=quick)

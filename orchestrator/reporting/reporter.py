"""What the run is doing and what it waits for: `status.json` every second, a log line every ten."""

import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from headpond.broker.queues import Queue, WorkerKind
from headpond.config import RunConfig
from headpond.event_loop.loop_lag import LoopLag
from headpond.event_loop.offload import to_its_end_in_io_thread
from headpond.ledger.queries import balance
from headpond.ledger.states import JobState, RolloutState
from headpond.orchestrator import run_dir
from headpond.orchestrator.duties.housekeeping import Reported
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.reconciler import Running, Snapshot
from headpond.orchestrator.reporting.metrics import LagPoller

logger = logging.getLogger("headpond.orchestrator")

EVERY_S = 1.0
RATE_OVER = 11  # statuses: ten seconds
LINE_EVERY_S = 10.0
UNATTENDED_S = 5.0  # a queue from which nothing is taken for this long has no worker
StatusCallback = Callable[[dict[str, Any]], None]
"""called with every status, on the event loop: it must return at once"""


def ignore_status(status: dict[str, Any]) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What a status is read from."""

    config: RunConfig
    run: str
    http_url: str | None
    """of the HTTP endpoint"""
    ledger: Ledger
    broker: Broker
    lag: LoopLag
    """of this process"""
    lags: LagPoller
    phase: Callable[[], str]
    """`done`, or the phase of shutting down"""
    snapshot: Callable[[], Snapshot]
    """Redis at the last poll"""
    running: Callable[[], Running]
    """what the leases of that poll show"""
    excluded: Callable[[], dict[str, str]]
    """workers that take no jobs -> why"""
    silent: Callable[[], dict[str, float]] = dict
    """workers that are listed and say nothing -> for how many seconds"""
    replicas: Callable[[], dict[str, Any]]
    """URL -> which weights it has, whether it serves, its load, what it gave and cost"""
    troubles: Callable[[], Iterable[str | None]]
    """of every component that may hold up the run"""
    evaluations: Callable[[], dict[str, Any]] = dict
    """`Evaluations.status`"""
    losses: Callable[[], dict[str, Any]] = dict
    """`Causes.recent`"""
    next_step: Callable[[], dict[str, Any]] = dict
    """`NextStep.status`"""
    notes: Callable[[], list[str]]
    """what to know although the run does not wait for it"""


class Reporter:
    def __init__(self, sources: Sources, on_status: StatusCallback = ignore_status) -> None:
        self._sources = sources
        self._ledger = sources.ledger
        self._on_status = on_status
        self._path = sources.config.run_dir / "status.json"
        self._started = time.monotonic()
        self.writing = Reported(f"write {self._path}", "free space or repair the disk")
        self._latest: dict[str, Any] = {}
        self._generated: deque[tuple[float, int, int]] = deque(maxlen=RATE_OVER)
        """(time, rollouts, tokens)"""
        self._moved_at: dict[Queue, float] = {}
        self._oldest: dict[Queue, int | None] = {}

    async def run(self) -> None:
        logged_at = time.monotonic()
        while True:
            self._watch_queues()
            state = self._ledger.state
            self._generated.append((time.monotonic(), state.rollouts_generated, state.tokens_generated))
            await self.write()
            if time.monotonic() - logged_at > LINE_EVERY_S:
                logged_at = time.monotonic()
                self._log_progress()
            await asyncio.sleep(EVERY_S)

    async def write(self, *, stopped_by: str | None = None) -> None:
        self._latest = self.status(stopped_by=stopped_by)
        self._on_status(self._latest)
        with self.writing:
            await to_its_end_in_io_thread(run_dir.write_json, self._path, self._latest)

    def latest_status(self) -> dict[str, Any]:
        """The content of status.json, also while that cannot be written."""
        return self._latest or self.status()

    def status(self, *, stopped_by: str | None = None) -> dict[str, Any]:
        sources, ledger, snapshot = self._sources, self._ledger, self._sources.snapshot()
        planned, fenced = ledger.state.rollouts_planned, ledger.state.fenced
        return {
            "run": sources.run,
            "phase": sources.phase(),
            "stopped_by": stopped_by,
            "process": {"host": socket.gethostname(), "pid": os.getpid()},
            "at": time.time(),
            "http": sources.http_url,
            "running_s": round(time.monotonic() - self._started, 1),
            "step": ledger.state.steps_delivered,
            "steps": sources.config.steps,
            "policy_version": ledger.state.policy_version,
            "rollouts": balance(planned, ledger.states, ledger.reasons, fenced),
            "replies_refused": ledger.state.replies_refused,
            "states": {state.value: ledger.states[state] for state in RolloutState if ledger.states[state]},
            **self._rates(),
            **self._open_jobs(),
            "queued": {queue.value: snapshot.depths.get(queue, 0) for queue in Queue},
            "running_by_worker": dict(sources.running().by_worker),
            "excluded_workers": sources.excluded(),
            "silent_workers": sources.silent(),
            "replicas": sources.replicas(),
            "stored_bytes": ledger.state.open_bytes + ledger.state.delivered_bytes,
            "waiting_for": self.waiting_for(),
            "losses": sources.losses(),
            "next_step": sources.next_step(),
            "notes": sources.notes(),
            "evaluations": sources.evaluations(),
            "event_loop_lag": sources.lag.summary().as_dict(),
            "other_loops": {lag.process: lag.as_dict() for lag in sources.lags.others},
        }

    def waiting_for(self) -> list[str]:
        """Every reason why the run does not move as fast as it could, each with what to do."""
        now = time.monotonic()
        unattended = [
            f"no worker takes jobs from the queue {queue}: start one: {WorkerKind.of(queue).command}"
            for queue, moved_at in self._moved_at.items()
            if now - moved_at > UNATTENDED_S and self._sources.broker.trouble is None
        ]
        return [
            cause
            for cause in [
                *self._sources.troubles(),
                *self._sources.excluded().values(),
                self.writing.trouble,
                *unattended,
            ]
            if cause
        ]

    def _rates(self) -> dict[str, float]:
        """Of generated rollouts over the last ten seconds: deliveries come a step at a time."""
        if len(self._generated) < 2:
            return {"rollouts_per_s": 0.0, "tokens_per_s": 0.0}
        (began, *first), (ended, *last) = self._generated[0], self._generated[-1]
        rollouts, tokens = (round((now - then) / (ended - began), 1) for then, now in zip(first, last, strict=True))
        return {"rollouts_per_s": rollouts, "tokens_per_s": tokens}

    def _open_jobs(self) -> dict[str, dict[str, int]]:
        jobs = self._ledger.job_counts
        return {
            f"{state}_jobs": {queue.value: jobs[queue, state] for queue in Queue}
            for state in (JobState.WAITING, JobState.SUBMITTED)
        }

    def _watch_queues(self) -> None:
        """A queue moves when its oldest message changes, when it is empty, or when a worker of its kind is busy."""
        snapshot = self._sources.snapshot()
        busy = set(map(WorkerKind.of, self._sources.running().queues))
        for queue, depth in snapshot.depths.items():
            if depth == 0 or WorkerKind.of(queue) in busy or snapshot.oldest[queue] != self._oldest.get(queue):
                self._moved_at[queue] = time.monotonic()
            self._oldest[queue] = snapshot.oldest[queue]

    def _log_progress(self) -> None:
        status = self._latest
        rollouts = status["rollouts"]
        logger.info(
            "action=progress step=%d/%d planned=%d delivered=%d in_flight=%d filtered=%d dead=%d%s",
            status["step"], status["steps"], rollouts["planned"], rollouts["delivered"], rollouts["in_flight"],
            sum(rollouts["filtered"].values()), rollouts["dead"],
            "".join(f" waiting_for={cause!r}" for cause in status["waiting_for"]),
        )  # fmt: skip

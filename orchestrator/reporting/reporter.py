"""What the run is doing and what it waits for: `status.json` every second, a log line every ten."""

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headpond.broker.queues import Queue, WorkerKind
from headpond.event_loop.offload import to_its_end_in_io_thread
from headpond.ledger.queries import balance
from headpond.ledger.states import JobState, RolloutState
from headpond.orchestrator import run_dir
from headpond.orchestrator.duties.housekeeping import Reported, Troubles
from headpond.orchestrator.reporting.next_step import NextStep
from headpond.records.status import Process, Status

if TYPE_CHECKING:
    from headpond.orchestrator.components import Components

logger = logging.getLogger("headpond.orchestrator")

EVERY_S = 1.0
RATE_OVER = 11  # statuses: ten seconds
LINE_EVERY_S = 10.0
UNATTENDED_S = 5.0  # a queue from which nothing is taken for this long has no worker
# called with every status, on the event loop: it must return at once
StatusCallback = Callable[[Status], None]


def ignore_status(status: Status) -> None:
    pass


class Reporter:
    def __init__(
        self,
        run: "Components",
        troubles: Troubles,
        http_url: str | None = None,
        on_status: StatusCallback = ignore_status,
    ) -> None:
        """`http_url`: of the HTTP endpoint."""
        self._run = run
        self._ledger = run.ledger
        self._troubles = troubles
        self._http_url = http_url
        self._on_status = on_status
        self._next_step = NextStep(run.config, run.ledger, run.trainer, run.pipeline, run.reconciler)
        self._path = run.config.run_dir / "status.json"
        self._started = self._logged_at = time.monotonic()
        self.writing = Reported(f"write {self._path}", "free space or repair the disk", troubles=troubles)
        troubles.add(self._unattended)
        self._latest: Status | None = None
        # (time, rollouts, tokens)
        self._generated: deque[tuple[float, int, int]] = deque(maxlen=RATE_OVER)
        self._moved_at: dict[Queue, float] = {}
        self._oldest: dict[Queue, int | None] = {}

    async def report(self) -> None:
        self._watch_queues()
        now, state = time.monotonic(), self._ledger.state
        self._generated.append((now, state.rollouts_generated, state.tokens_generated))
        await self.write()
        if now - self._logged_at > LINE_EVERY_S:
            self._logged_at = now
            self._log_progress(self.latest_status())

    async def write(self, *, stopped_by: str | None = None) -> None:
        self._latest = self.status(stopped_by=stopped_by)
        self._on_status(self._latest)
        with self.writing:
            await to_its_end_in_io_thread(run_dir.write_json, self._path, self._latest.model_dump())

    def latest_status(self) -> Status:
        """Return the content of status.json, also while that cannot be written."""
        return self._latest or self.status()

    def status(self, *, stopped_by: str | None = None) -> Status:
        run, ledger, jobs = self._run, self._ledger, self._ledger.job_counts
        planned, fenced = ledger.state.rollouts_planned, ledger.state.fenced
        waiting_for, notes = self._troubles.texts(), self._troubles.notes.texts()
        rollouts_per_s, tokens_per_s = self._rates()
        return Status(
            run=run.run_id,
            phase=str(run.phase),
            stopped_by=stopped_by,
            process=Process(host=socket.gethostname(), pid=os.getpid()),
            at=time.time(),
            http=self._http_url,
            running_s=round(time.monotonic() - self._started, 1),
            step=ledger.state.steps_delivered,
            steps=run.config.steps,
            policy_version=ledger.state.policy_version,
            rollouts=balance(planned, ledger.states, ledger.reasons, fenced),
            replies_refused=ledger.state.replies_refused,
            states={state.value: ledger.states[state] for state in RolloutState if ledger.states[state]},
            rollouts_per_s=rollouts_per_s,
            tokens_per_s=tokens_per_s,
            waiting_jobs={queue.value: jobs[queue, JobState.WAITING] for queue in Queue},
            submitted_jobs={queue.value: jobs[queue, JobState.SUBMITTED] for queue in Queue},
            queued={queue.value: run.reconciler.latest.depths.get(queue, 0) for queue in Queue},
            running_by_worker=run.reconciler.running.by_worker,
            excluded_workers=run.attendance.excluded,
            silent_workers=run.attendance.silent,
            replicas=self._replicas(),
            stored_bytes=ledger.state.open_bytes + ledger.state.delivered_bytes,
            waiting_for=waiting_for,
            losses=run.pipeline.causes.recent(),
            next_step=self._next_step.status(),
            notes=[note for note in notes if run.phase.ends or note not in waiting_for],
            evaluations=run.evaluations.status(),
            event_loop_lag=run.lag.summary().as_dict(),
            other_loops={lag.process: lag.as_dict() for lag in run.lags.others},
        )

    def _unattended(self) -> list[str]:
        if self._run.broker.trouble.text:
            return []  # the queues cannot be read
        now = time.monotonic()
        return [
            f"no worker takes jobs from the queue {queue}: start one: {WorkerKind.of(queue).command}"
            for queue, moved_at in self._moved_at.items()
            if now - moved_at > UNATTENDED_S
        ]

    def _replicas(self) -> dict[str, dict[str, Any]]:
        run = self._run
        weights, loads, costs = run.replica_watch.status(), run.load.status(), run.replies.replica_costs.status()
        return {url: {**weights[url], **loads.get(url, {}), **costs[url]} for url in weights}

    def _rates(self) -> tuple[float, float]:
        """Rollouts and tokens a second, over the last ten seconds: deliveries come a step at a time."""
        if len(self._generated) < 2:
            return 0.0, 0.0
        (began, *first), (ended, *last) = self._generated[0], self._generated[-1]
        rollouts, tokens = (round((now - then) / (ended - began), 1) for then, now in zip(first, last, strict=True))
        return rollouts, tokens

    def _watch_queues(self) -> None:
        """A queue moves when its oldest message changes, when it is empty, or when a worker of its kind is busy."""
        snapshot, running = self._run.reconciler.latest, self._run.reconciler.running
        busy = set(map(WorkerKind.of, running.queues))
        for queue, depth in snapshot.depths.items():
            if depth == 0 or WorkerKind.of(queue) in busy or snapshot.oldest[queue] != self._oldest.get(queue):
                self._moved_at[queue] = time.monotonic()
            self._oldest[queue] = snapshot.oldest[queue]

    def _log_progress(self, status: Status) -> None:
        rollouts = status.rollouts
        logger.info(
            "action=progress step=%d/%d planned=%d delivered=%d in_flight=%d filtered=%d dead=%d%s",
            status.step, status.steps, rollouts["planned"], rollouts["delivered"], rollouts["in_flight"],
            sum(rollouts["filtered"].values()), rollouts["dead"],
            "".join(f" waiting_for={cause!r}" for cause in status.waiting_for),
        )  # fmt: skip

"""What the run is doing and what it waits for: `status.json` every second, a line in the log every ten."""

import asyncio
import logging
import operator
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from orchestrator import run_dir
from penstock.ids import LeaseId, LeaseValue
from penstock.ledger.queries import balance
from penstock.ledger.states import JobState, RolloutState
from penstock.messages import Queue
from penstock.runtime.offload import in_io_thread

if TYPE_CHECKING:
    from orchestrator.loop import Orchestrator

logger = logging.getLogger("penstock.orchestrator")

EVERY_S = 1.0
RATE_OVER = 11  # statuses: ten seconds
LINE_EVERY_S = 10.0
UNATTENDED_S = 5.0  # a queue that nobody takes from for this long has no worker
START_WORKERS = {
    Queue.ROLLOUTS: "celery -A workers.rollouts worker -Q rollouts -c 256",
    Queue.FILTERING: "celery -A workers.compute worker -Q filtering,advantages,encoding -c 4",
    Queue.ADVANTAGES: "celery -A workers.compute worker -Q filtering,advantages,encoding -c 4",
    Queue.ENCODING: "celery -A workers.compute worker -Q filtering,advantages,encoding -c 4",
}


Watch = Callable[[dict[str, Any]], None]
"""is shown every status, on the loop: it must return at once"""


def nobody(status: dict[str, Any]) -> None:
    pass


class Reporter:
    def __init__(self, orchestrator: "Orchestrator", watch: Watch = nobody) -> None:
        self._orchestrator = orchestrator
        self._watch = watch
        self._started = time.monotonic()
        self.trouble: str | None = None
        """why others cannot see what the run is doing"""
        self.latest: dict[str, Any] = {}
        """the last status"""
        self._generated: deque[tuple[float, int, int]] = deque(maxlen=RATE_OVER)
        """when, rollouts, tokens"""
        self._moved_at: dict[Queue, float] = {}
        self._oldest: dict[Queue, int | None] = {}

    async def run(self) -> None:
        said_at = time.monotonic()
        while True:
            self._watch_queues()
            count = self._orchestrator.ledger.number
            self._generated.append((time.monotonic(), count("rollouts_generated"), count("tokens_generated")))
            await self.write()
            if time.monotonic() - said_at > LINE_EVERY_S:
                said_at = time.monotonic()
                self._say()
            await asyncio.sleep(EVERY_S)

    async def write(self, *, stopped_by: str | None = None) -> None:
        path = self._orchestrator.config.run_dir / "status.json"
        status = self.status(stopped_by=stopped_by)
        self.latest = status
        self._watch(status)
        try:
            await in_io_thread(run_dir.write_json, path, status)
        except OSError as error:
            if self.trouble is None:
                logger.error("action=status_unwritten path=%s error=%s", path, error.strerror)
            self.trouble = f"{path} cannot be written ({error.strerror}): make room or mend its disk"
        else:
            self.trouble = None

    def status(self, *, stopped_by: str | None = None) -> dict[str, Any]:
        own, ledger = self._orchestrator, self._orchestrator.ledger
        workers = Counter(
            value.worker for value in map(LeaseValue.match, own.reconciler.latest.leases.values()) if value
        )
        return {
            "run": own.run_id,
            "phase": "done" if own.done else own.stopping.phase,
            "stopped_by": stopped_by,
            "process": {"host": socket.gethostname(), "pid": os.getpid()},
            "at": time.time(),
            "http": own.url,
            "running_s": round(time.monotonic() - self._started, 1),
            "step": ledger.number("steps_delivered"),
            "steps": own.config.steps,
            "policy_version": ledger.number("policy_version"),
            "rollouts": balance(
                ledger.number("rollouts_planned"), ledger.states, ledger.reasons, ledger.number("fenced")
            ),
            "states": {state.value: ledger.states[state] for state in RolloutState if ledger.states[state]},
            **self._speed(),
            **self._jobs(),
            "queued": {queue.value: own.reconciler.latest.depths.get(queue, 0) for queue in Queue},
            "running_by_worker": dict(workers),
            "stored_bytes": ledger.number("open_bytes") + ledger.number("delivered_bytes"),
            "waiting_for": self.waiting_for(),
            "event_loop_lag": own.lag.summary().as_dict(),
            "other_loops": {lag.process: lag.as_dict() for lag in own.lags.others},
        }

    def waiting_for(self) -> list[str]:
        """Every reason why the run is not moving as it could, in the user's words."""
        own = self._orchestrator
        plans = own.submitter.plan_files
        causes = [own.broker.trouble, own.ledger.trouble, *own.gates.troubles, plans.trouble, own.sealer.trouble,
                  own.planner.trouble, *own.trainer.troubles, own.metrics.trouble, self.trouble]  # fmt: skip
        now = time.monotonic()
        unattended = [
            f"nobody takes jobs from the queue {queue}: start a worker: {START_WORKERS[queue]}"
            for queue, moved_at in self._moved_at.items()
            if now - moved_at > UNATTENDED_S and own.broker.trouble is None
        ]
        return [cause for cause in [*causes, *unattended] if cause]

    def _speed(self) -> dict[str, float]:
        """Generated, over the last few seconds: deliveries come a step at a time."""
        if len(self._generated) < 2:
            return {"rollouts_per_s": 0.0, "tokens_per_s": 0.0}
        (began, *first), (ended, *last) = self._generated[0], self._generated[-1]
        rollouts, tokens = (round((now - then) / (ended - began), 1) for then, now in zip(first, last, strict=True))
        return {"rollouts_per_s": rollouts, "tokens_per_s": tokens}

    def _jobs(self) -> dict[str, dict[str, int]]:
        jobs = Counter[tuple[Queue, JobState]]()
        held = map(operator.attrgetter("kind", "state"), self._orchestrator.ledger.jobs.values())
        for (kind, state), number in Counter(held).items():
            jobs[kind.queue, state] += number
        return {
            f"{state}_jobs": {queue.value: jobs[queue, state] for queue in Queue}
            for state in (JobState.WAITING, JobState.SUBMITTED)
        }

    def _watch_queues(self) -> None:
        """A queue moves when its oldest message changes, or is empty."""
        seen, busy = self._orchestrator.reconciler.latest, set(self._busy_queues())
        for queue, depth in seen.depths.items():
            if depth == 0 or queue in busy or seen.oldest[queue] != self._oldest.get(queue):
                self._moved_at[queue] = time.monotonic()
            self._oldest[queue] = seen.oldest[queue]

    def _busy_queues(self) -> list[Queue]:
        """Queues of which some job holds a lease: their workers are there, and full."""
        own = self._orchestrator
        jobs = (own.ledger.jobs.get(id.job) for id in map(LeaseId.match, own.reconciler.latest.leases) if id)
        return [job.kind.queue for job in jobs if job is not None]

    def _say(self) -> None:
        status = self.status()
        rollouts = status["rollouts"]
        logger.info(
            "action=progress step=%d/%d planned=%d delivered=%d in_flight=%d filtered=%d dead=%d%s",
            status["step"], status["steps"], rollouts["planned"], rollouts["delivered"], rollouts["in_flight"],
            sum(rollouts["filtered"].values()), rollouts["dead"],
            "".join(f" waiting_for={cause!r}" for cause in status["waiting_for"]),
        )  # fmt: skip

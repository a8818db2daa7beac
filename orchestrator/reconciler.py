"""Finds lost jobs: once a second, compares the ledger's submitted jobs with the leases and queues in Redis.

Time is counted over polls that were made, by this process's clock: a pause of the orchestrator, a flush of Redis or the
clock of another host does not make a job lost. Reading and judging are done in slices: other tasks settle, retry and
submit jobs between two of them, so a job is judged by its state in its own slice, each with its effects at once.
"""

import logging
import math
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from headpond.broker.queues import Queue
from headpond.config import RunConfig
from headpond.ids import LeaseId, LeaseValue
from headpond.ledger.states import GroupState, JobState
from headpond.orchestrator.duties.slices import in_slices
from headpond.orchestrator.exchange.gates import Gates
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import JobRecord
from headpond.orchestrator.pipeline import Pipeline
from headpond.orchestrator.replies import Replies
from headpond.orchestrator.workforce.leases import read_leases
from headpond.tasks import envelope
from headpond.tasks.stage import GRACE_S

logger = logging.getLogger("headpond.reconciler")

POLL_MOST_S = 1.0
POLLS_PER_LEASE = 5
JUDGED_AT_ONCE = 250  # leases, jobs or groups: about 1 ms, and 2 ms when all of the jobs have begun to run


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Queues in Redis at one moment, and the leases just after it: a job that is taken meanwhile counts as queued."""

    leases: dict[str, str]
    depths: dict[Queue, int]
    # sequence of the oldest queued message; None if it is not one of ours
    oldest: dict[Queue, int | None]
    last_sequence: float = math.inf  # of the jobs submitted before: later ones are not judged


@dataclass(frozen=True, kw_only=True)
class Running:
    """What the leases of the last snapshot show."""

    by_worker: Counter[str] = field(default_factory=Counter[str])  # worker -> its executions
    queues: set[Queue] = field(default_factory=set[Queue])  # whose jobs are being executed
    # job -> the worker that executes it
    worker_of: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(kw_only=True)
class ObservedAttempt:
    """What the polls have shown of one submitted attempt."""

    attempt: int
    running_s: float = 0.0
    missing_s: float = 0.0
    # policy version when it was first seen running: its first token is of this version or an
    # older one
    version: int | None = None


@dataclass(kw_only=True)
class Beat:
    """The value of a lease, and for how long it has not changed."""

    id: LeaseId | None  # None if another program wrote the lease
    value: str | None = None
    silent_s: float = 0.0


class Reconciler:
    def __init__(
        self,
        config: RunConfig,
        run: str,
        ledger: Ledger,
        broker: Broker,
        pipeline: Pipeline,
        replies: Replies,
        gates: Gates,
    ) -> None:
        self._config = config
        self._run = run
        self._ledger = ledger
        self._broker = broker
        self._pipeline = pipeline
        self._replies = replies
        self._gates = gates
        self.poll_s = min(POLL_MOST_S, config.recovery.lease_s / POLLS_PER_LEASE)
        self._beats: dict[str, Beat] = {}
        self._observed: dict[str, ObservedAttempt] = {}
        self._ages_s: dict[str, float] = {}
        self._polled_at: float | None = None
        self.latest = Snapshot(leases={}, depths={}, oldest={})  # the last one that was judged
        self.running = Running()

    def running_s(self, job: JobRecord) -> float | None:
        """Since when its newest attempt was seen running."""
        observed = self._observed.get(job.id)
        return observed.running_s if observed and observed.attempt == job.attempt else None

    def group_age_s(self, group: str) -> float:
        """Running time that counts towards `rollouts.group_timeout_s`."""
        return self._ages_s.get(group, 0.0)

    async def poll(self) -> Snapshot:
        async def read(client: Any) -> list[Any]:
            async with client.pipeline(transaction=True) as pipe:
                for queue in Queue:
                    pipe.llen(queue)
                    pipe.lindex(queue, -1)
                return await pipe.execute()

        last_sequence = self._ledger.state.sequence
        queues = await self._broker.call(read)
        return Snapshot(
            leases=await read_leases(self._broker),
            last_sequence=last_sequence,
            depths=dict(zip(Queue, queues[::2], strict=True)),
            oldest={queue: envelope.sequence_of(message, self._run) if message else None
                    for queue, message in zip(Queue, queues[1::2], strict=True)},
        )  # fmt: skip

    async def judge(self, snapshot: Snapshot) -> list[str]:
        """Call when every reply that was in the stream at the time of `snapshot` has been applied. Return the leases
        that have expired."""
        self.latest = snapshot
        now = time.monotonic()
        # After a pause, this poll counts as two poll intervals at most.
        passed_s = min(now - self._polled_at, 2 * self.poll_s) if self._polled_at is not None else 0.0
        self._polled_at = now
        expired = list[str]()
        alive = await self._alive(snapshot, passed_s, expired)
        # A job submitted with this sequence or a later one may still be in the queue.
        queued_from = {queue: (snapshot.oldest[queue] or 0) if snapshot.depths[queue] else math.inf for queue in Queue}
        still_observed: dict[str, ObservedAttempt] = {}
        running: set[str] = set()
        async for some in in_slices(list(self._ledger.jobs.values()), JUDGED_AT_ONCE):
            for job in some:
                if job.state is not JobState.SUBMITTED or job.sequence > snapshot.last_sequence:
                    continue
                beating, queued = alive.get((job.id, job.attempt)), job.sequence >= queued_from[job.queue]
                # Most jobs are still queued and need no observation.
                if beating is not None or not queued or job.id in self._observed:
                    still_observed[job.id] = self._judge_job(job, queued, passed_s, beating)
                if beating:
                    running.add(job.subject)
            self._ledger.commit_soon()
        self._observed = still_observed
        await self._judge_groups(passed_s if self._gates.rollouts.open else 0.0, running)
        return expired

    async def _judge_groups(self, passed_s: float, running: set[str]) -> None:
        """A group that has been running for `group_timeout_s` continues without its unfinished rollouts.

        Time in which none of its rollouts runs does not count: the engine is away, or the queue is long.
        """
        if self._config.rollouts.partial_groups == "wait":
            return
        async for some in in_slices([*running, *(self._ages_s.keys() - running)], JUDGED_AT_ONCE):
            for id in some:
                group = self._ledger.groups.get(id)
                if group is None or group.state != GroupState.PLAYING or group.is_evaluation:
                    self._ages_s.pop(id, None)
                    continue
                age_s = self._ages_s[id] = self._ages_s.get(id, 0.0) + (passed_s if id in running else 0.0)
                if age_s > self._config.rollouts.group_timeout_s:
                    self._pipeline.play.stop_waiting(group)

    async def _alive(self, snapshot: Snapshot, passed_s: float, expired: list[str]) -> dict[tuple[str, int], bool]:
        """(job, attempt) -> whether one of its leases beats; no entry without a lease."""
        beats: dict[str, Beat] = {}
        alive: dict[tuple[str, int], bool] = defaultdict(bool)
        seen = Running()
        async for some in in_slices(list(snapshot.leases.items()), JUDGED_AT_ONCE):
            for lease, value in some:
                beat = beats[lease] = self._beats.get(lease) or Beat(id=LeaseId.match(lease))
                beat.silent_s = beat.silent_s + passed_s if beat.value == value else 0.0
                beat.value = value
                beating = beat.silent_s < self._config.recovery.lease_s
                if not beating:
                    expired.append(lease)
                if beat.id and beat.id.run == self._run:
                    alive[beat.id.job, beat.id.attempt] |= beating
                    if job := self._ledger.jobs.get(beat.id.job):
                        seen.queues.add(job.queue)
                if held := LeaseValue.match(value):
                    seen.by_worker[held.worker] += 1
                    if beat.id and beating:
                        seen.worker_of[beat.id.job] = held.worker
        self._beats, self.running = beats, seen
        return alive

    def _judge_job(self, job: JobRecord, queued: bool, passed_s: float, alive: bool | None) -> ObservedAttempt:
        observed = self._observed.get(job.id)
        if observed is None or observed.attempt != job.attempt:
            observed = ObservedAttempt(attempt=job.attempt)
        if alive:
            observed.missing_s = 0.0
            observed.running_s += passed_s
            if observed.version is None:
                observed.version = self._ledger.state.policy_version
            stage = self._pipeline.stage_of(job)
            cancelled = stage.seen_running(job, observed.version)
            if not cancelled and observed.running_s > stage.timeout_s + GRACE_S + self._config.recovery.lease_s:
                self._pipeline.play.revoke(job)
                self._replies.job_lost(
                    job, f"still running {observed.running_s:.0f} s after its start, over its time-out"
                )
        elif alive is False:
            self._replies.job_lost(job, "the worker's lease expired")
        elif queued:
            observed.missing_s = 0.0
        else:
            observed.missing_s += passed_s
            if observed.missing_s > self._config.recovery.lease_s:
                self._replies.job_lost(job, "not queued, not running, and no reply")
        return observed

"""Finds what was lost: once a second, the ledger's submitted jobs against the leases and the queues.

Only polls that were really made count, and only by this process's clock: a paused orchestrator, a flushed Redis or
another host's clock condemns nobody.
"""

import logging
import math
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from orchestrator.broker import Broker
from orchestrator.groups import Groups
from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.records import JobRecord
from orchestrator.staleness import Staleness
from penstock import redis_keys
from penstock.config import RunConfig
from penstock.ids import LeaseId
from penstock.ledger.states import GroupState, JobKind, JobState, RolloutState
from penstock.messages import GRACE_S, Queue
from tasks import envelope

logger = logging.getLogger("penstock.reconciler")

POLL_MOST_S = 1.0
POLLS_A_LEASE = 5


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What Redis said at one moment."""

    leases: dict[str, str]
    depths: dict[Queue, int]
    oldest: dict[Queue, int | None]
    """sequence of the oldest queued message; None when it is not one of ours"""


@dataclass(kw_only=True)
class Watch:
    """What the polls have shown of one submitted attempt."""

    attempt: int
    running_s: float = 0.0
    missing_s: float = 0.0
    version: int | None = None
    """the policy's when it was first seen running: its first token is of this one, or older"""


@dataclass(kw_only=True)
class Beat:
    value: str
    silent_s: float = 0.0


@dataclass(kw_only=True)
class Findings:
    expired_leases: list[str] = field(default_factory=list[str])
    revoke: list[str] = field(default_factory=list[str])
    """Celery task ids of attempts that are still running and no longer wanted"""


class Reconciler:
    def __init__(self, config: RunConfig, run: str, ledger: Ledger, broker: Broker, stages: Groups) -> None:
        self._config = config
        self._run = run
        self._ledger = ledger
        self._broker = broker
        self._staleness = Staleness(config, ledger)
        self._stages = stages
        self.poll_s = min(POLL_MOST_S, config.recovery.lease_s / POLLS_A_LEASE)
        self._beats: dict[str, Beat] = {}
        self._watched: dict[str, Watch] = {}
        self._ages_s: dict[str, float] = {}
        self._polled_at: float | None = None
        self.latest = Snapshot(leases={}, depths={}, oldest={})

    async def look(self) -> Snapshot:
        async def ask(client: Any) -> list[Any]:
            async with client.pipeline(transaction=True) as pipe:
                pipe.hgetall(redis_keys.LEASES)
                for queue in Queue:
                    pipe.llen(queue)
                    pipe.lindex(queue, -1)
                return await pipe.execute()

        leases, *queues = await self._broker.ask(ask)
        return Snapshot(
            leases={field.decode(): value.decode() for field, value in leases.items()},
            depths=dict(zip(Queue, queues[::2], strict=True)),
            oldest={queue: envelope.sequence_of(message) if message else None
                    for queue, message in zip(Queue, queues[1::2], strict=True)},
        )  # fmt: skip

    def judge(self, seen: Snapshot) -> Findings:
        """To be called when every reply that was in the stream at the time of `seen` has been applied."""
        self.latest = seen
        now = time.monotonic()
        # However long ago the last poll was, this one adds no more than two polls' worth to anybody's silence.
        passed_s = min(now - self._polled_at, 2 * self.poll_s) if self._polled_at is not None else 0.0
        self._polled_at = now
        findings = Findings()
        alive = self._alive(seen, passed_s, findings)
        queued_from = {queue: _queued_from(seen, queue) for queue in Queue}
        submitted = [job for job in self._ledger.jobs.values() if job.state is JobState.SUBMITTED]
        for job in submitted:
            beating, queued = alive.get((job.id, job.attempt)), job.sequence >= queued_from[job.kind.queue]
            # Most have been in their queue ever since: there is nothing to watch. Some went with the one before them.
            if job.state is JobState.SUBMITTED and (beating is not None or not queued or job.id in self._watched):
                self._judge_job(job, queued, passed_s, beating, findings)
        self._watched = {job.id: self._watched[job.id] for job in submitted if job.id in self._watched}
        self._judge_groups(passed_s)
        return findings

    def _judge_groups(self, passed_s: float) -> None:
        """A group that has been collecting for too long goes on without the rollouts that are still out."""
        if self._config.rollouts.partial_groups == "wait":
            return
        collecting = [g for g in self._ledger.groups.values() if g.state is GroupState.COLLECTING]
        self._ages_s = {group.id: self._ages_s.get(group.id, 0.0) + passed_s for group in collecting}
        for group in collecting:
            if self._ages_s[group.id] > self._config.rollouts.group_timeout_s:
                self._stages.give_up_waiting(group)

    def _alive(self, seen: Snapshot, passed_s: float, findings: Findings) -> dict[tuple[str, int], bool]:
        """(job, attempt) -> whether one of its leases beats; nothing for those that have none."""
        beats: dict[str, Beat] = {}
        alive: dict[tuple[str, int], bool] = defaultdict(bool)
        for lease, value in seen.leases.items():
            before = self._beats.get(lease)
            silent_s = before.silent_s + passed_s if before and before.value == value else 0.0
            beats[lease] = Beat(value=value, silent_s=silent_s)
            beating = silent_s < self._config.recovery.lease_s
            if not beating:
                findings.expired_leases.append(lease)
            id = LeaseId.match(lease)
            if id and id.run == self._run:
                alive[id.job, id.attempt] |= beating
        self._beats = beats
        return alive

    def _judge_job(self, job: JobRecord, queued: bool, passed_s: float, alive: bool | None, findings: Findings) -> None:
        watch = self._watched.get(job.id)
        if watch is None or watch.attempt != job.attempt:
            watch = self._watched[job.id] = Watch(attempt=job.attempt)
        if alive:
            watch.missing_s = 0.0
            watch.running_s += passed_s
            self._running(job)
            if watch.version is None:
                watch.version = self._ledger.number("policy_version")
            if job.kind is JobKind.ROLLOUT and self._staleness.drops(watch.version):
                self._stages.outdated(job)
            elif watch.running_s > self._timeout_s(job) + GRACE_S + self._config.recovery.lease_s:
                findings.revoke.append(job.task_id(self._run))
                self._stages.lost(job, f"still running {watch.running_s:.0f} s after its start, over its time-out")
        elif alive is False:
            self._stages.lost(job, "the worker's lease expired")
        elif queued:
            watch.missing_s = 0.0
        else:
            watch.missing_s += passed_s
            if watch.missing_s > self._config.recovery.lease_s:
                self._stages.lost(job, "neither queued, nor running, nor answered")

    def _timeout_s(self, job: JobRecord) -> float:
        if job.kind is JobKind.ROLLOUT:
            return self._config.rollouts.timeout_s
        return self._config.recovery.stage_timeout_s

    def _running(self, job: JobRecord) -> None:
        if job.kind is JobKind.ROLLOUT and (rollout := self._ledger.rollout(job)).state is RolloutState.SUBMITTED:
            self._ledger.move(rollout, RolloutState.RUNNING)


def _queued_from(seen: Snapshot, queue: Queue) -> float:
    """A job that was submitted with this sequence, or later, may still be in `queue`."""
    if not seen.depths[queue]:
        return math.inf
    return seen.oldest[queue] or 0

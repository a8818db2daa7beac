"""Who works for the run: the workers that are there, those that do not match it, and those in quarantine.

Reads what workers say of themselves and publishes the run's settings and the orders, once a second in one pipeline.
The rule of quarantine is in `quarantine.py`.
"""

import logging
import time
from dataclasses import dataclass
from typing import Any

import orjson

from headpond.broker import redis_keys
from headpond.broker.queues import WorkerKind
from headpond.config import RunConfig
from headpond.errors import shortened
from headpond.event_loop.loop_lag import blocked_cause
from headpond.orchestrator.duties.housekeeping import Troubles
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.orchestrator.ledger.rows import JobRecord
from headpond.orchestrator.workforce.quarantine import Peer, Quarantine, Standing
from headpond.tasks.agreement import RESTART, Order, Presence, digest, used_settings
from headpond.tasks.stage import Outcome, Reply

logger = logging.getLogger("headpond.attendance")

LISTED_MOST = 4  # workers that a message names; when this many have failed a job, the job is to blame
PAUSE_FIRST_S, PAUSE_MOST_S = 0.25, 8.0  # before a job is submitted again
DECLINES_MOST = 20  # then any worker may try: those that have not failed the job take none
REMEMBER_S = 60.0  # for which a worker of another release is named after its last reply
STRANGERS_MOST = 32
SILENT_S = 3.0  # a worker says something every second
ERROR_CHARACTERS = 300
FAILURES = (Outcome.FAILED, Outcome.UNREACHABLE, Outcome.UNWRITTEN)


@dataclass(kw_only=True)
class Seen:
    """A worker's last words, and since when they have not changed, by this process's clock."""

    presence: Presence
    at: float


class Attendance:
    def __init__(
        self, config: RunConfig, broker: Broker, *, first_sequence: int = 0, troubles: Troubles | None = None
    ) -> None:
        """`first_sequence`: jobs up to it were submitted by an earlier start, maybe with other settings."""
        self._broker = broker
        self._lease_s = config.recovery.lease_s
        self._first_sequence = first_sequence
        settings = {kind: used_settings(config, kind) for kind in WorkerKind}
        self._digests = {kind: digest(settings[kind]) for kind in WorkerKind}
        self._published: dict[str, str | bytes] = {kind.value: self._digests[kind] for kind in WorkerKind}
        self._published |= {f"{kind}:values": orjson.dumps(settings[kind]) for kind in WorkerKind}
        self._quarantine = Quarantine()
        (troubles or Troubles()).add(lambda: self.excluded.values())
        self._seen: dict[str, Seen] = {}
        # workers whose replies carry other settings than the run's -> time of the last
        # one
        self._strangers: dict[str, float] = {}

    # what the groups ask for every reply

    def uses(self, reply: Reply, job: JobRecord) -> bool:
        """Whether the reply was made with the run's settings, or answers a job of an earlier start."""
        if job.sequence <= self._first_sequence or reply.settings == self.digest_for(job):
            return True
        if reply.node not in self._seen:
            self._strangers[reply.node] = time.monotonic()
            if len(self._strangers) > STRANGERS_MOST:
                self._strangers.pop(next(iter(self._strangers)))
        return False

    def note(self, reply: Reply) -> None:
        """An outcome that says something about the health of its worker."""
        if reply.outcome is Outcome.DONE:
            self._quarantine.succeeded(reply.node)
        elif reply.outcome in FAILURES:
            self._quarantine.failed(reply.node, reply.error or "", time.monotonic())

    def is_excluded(self, node: str) -> bool:
        return self._quarantine.standing(node) is not Standing.ADMITTED

    def blames_job(self, job: JobRecord, node: str | None) -> bool:
        """Whether a failure counts for the job: no other worker could do better. Lists `node` on the job."""
        if node and node not in job.failed_by:
            job.failed_by = [*job.failed_by, node][-LISTED_MOST:]
        job.not_before = time.monotonic() + _pause_s(len(job.failed_by) + job.failures)
        return node is None or not self.listed(job)

    def give_back(self, job: JobRecord) -> None:
        """A worker declined the job: it waits, longer each time."""
        job.declines += 1
        job.not_before = time.monotonic() + _pause_s(job.declines)
        if job.declines > DECLINES_MOST:
            job.declines, job.failed_by = 0, []

    # what submission asks

    def digest_for(self, job: JobRecord) -> str:
        return self._digests[WorkerKind.of(job.queue)]

    def listed(self, job: JobRecord) -> tuple[str, ...]:
        """The workers that must not take the job: those that failed it, while another may do better."""
        if not job.failed_by or len(job.failed_by) >= LISTED_MOST:
            return ()
        others = self._admitted(WorkerKind.of(job.queue)) - set(job.failed_by)
        return tuple(job.failed_by) if others else ()

    # once a second

    async def exchange(self) -> list[str]:
        """Read who is there, decide, publish settings and orders. Returns the workers quarantined just now."""
        said: Any = await self._broker.call(lambda client: client.hgetall(redis_keys.WORKERS))
        now = time.monotonic()
        dead = self._hear({node.decode(): content for node, content in said.items()}, now)
        excluded = self._quarantine.review(self._peers(), now)
        for node in excluded:
            logger.warning("action=quarantined worker=%s %s", node, self.excluded.get(node, ""))
        orders = {node: order.model_dump_json() for node, order in self._orders().items()}

        async def publish(client: Any) -> None:
            async with client.pipeline(transaction=True) as pipe:
                pipe.hset(redis_keys.RUN_SETTINGS, mapping=self._published)
                pipe.expire(redis_keys.RUN_SETTINGS, redis_keys.ORCHESTRATOR_TTL_S)
                pipe.delete(redis_keys.ORDERS)
                if orders:
                    pipe.hset(redis_keys.ORDERS, mapping=orders)
                    pipe.expire(redis_keys.ORDERS, redis_keys.ORCHESTRATOR_TTL_S)
                if dead:
                    pipe.hdel(redis_keys.WORKERS, *dead)
                await pipe.execute()

        await self._broker.call(publish)
        return excluded

    @property
    def excluded(self) -> dict[str, str]:
        """Every worker that takes no jobs -> why, and what to do."""
        texts = {
            node: f"worker {node} takes no jobs: {seen.presence.refused}. {RESTART}"
            for node, seen in self._seen.items()
            if seen.presence.refused
        }
        for node, health in self._quarantine.excluded():
            error = shortened(health.error, ERROR_CHARACTERS)
            texts[node] = (
                f"worker {node} is quarantined: {health.failures} of its jobs failed while others succeed, the last "
                f"with: {error}. It is tried again every {health.pause_s:.0f} s; repair or stop it"
            )
        for stranger, at in self._strangers.items():
            if time.monotonic() - at < REMEMBER_S:
                texts[stranger] = (
                    f"results of worker {stranger} are not used: it runs another release of Headpond, or has other "
                    f"settings than the run. {RESTART}"
                )
        for node, seen in self._seen.items():
            if seen.presence.blocked_s is not None:
                texts[node] = blocked_cause(node, seen.presence.blocked_s, seen.presence.blocked_at)
        return texts

    @property
    def silent(self) -> dict[str, float]:
        """Every worker that is still listed and has said nothing of late -> for how many seconds."""
        ages = {node: time.monotonic() - seen.at for node, seen in self._seen.items()}
        return {node: round(age_s, 1) for node, age_s in ages.items() if age_s > SILENT_S}

    def _hear(self, said: dict[str, bytes], now: float) -> list[str]:
        """Remember who is there. Returns those that have been silent for too long."""
        dead: list[str] = []
        for node, content in said.items():
            presence = Presence.read(content)
            before = self._seen.get(node)
            if presence is None or (before and before.presence == presence and now - before.at > self._lease_s):
                dead.append(node)
            elif before is None or before.presence != presence:
                self._seen[node] = Seen(presence=presence, at=now)
        self._seen = {node: seen for node, seen in self._seen.items() if node in said and node not in dead}
        return dead

    def _peers(self) -> list[Peer]:
        return [
            Peer(node=node, kind=seen.presence.kind, running=seen.presence.running)
            for node, seen in self._seen.items()
            if seen.presence.settings == self._digests[seen.presence.kind] and seen.presence.blocked_s is None
        ]

    def _admitted(self, kind: WorkerKind) -> set[str]:
        return {peer.node for peer in self._peers() if peer.kind == kind and not self.is_excluded(peer.node)}

    def _orders(self) -> dict[str, Order]:
        return {
            node: Order(slots=0 if health.standing is Standing.QUARANTINED else 1, why=shortened(health.error))
            for node, health in self._quarantine.excluded()
        }


async def leave(broker: Broker) -> None:
    """Remove what was published: the orchestrator ends."""
    await broker.call(lambda client: client.delete(redis_keys.RUN_SETTINGS, redis_keys.ORDERS))


def _pause_s(times: int) -> float:
    return min(PAUSE_FIRST_S * 2 ** max(times - 1, 0), PAUSE_MOST_S)

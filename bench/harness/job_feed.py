"""Rollout jobs for one worker without an orchestrator: submits real messages and reads real replies.

A rollout's files are deleted when its reply is read, as if its step had been released.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from bench.harness.cluster import Cluster
from headpond.broker import redis_keys
from headpond.broker.queues import Queue
from headpond.errors import RunError
from headpond.ids import OWNER_KEY
from headpond.store import open_store
from headpond.tasks import envelope
from headpond.tasks.stages import play

RUN = "feed"
TIMEOUT_S = 600.0
REPLIES_AT_ONCE = 256
WAIT_MS = 20
"""wait for replies in one `read`, so that the caller can do other work in between"""
SEEDS = 1 << 31


@dataclass(kw_only=True)
class JobFeed:
    cluster: Cluster
    policy_error: str | None = None
    """the policy error that every rollout must end with; None: no error"""
    submitted: int = 0
    finished: int = 0
    _position: str = field(default="0-0", init=False)
    _open: set[str] = field(default_factory=set[str], init=False)
    """jobs without a reply: a reply may arrive twice"""

    def __post_init__(self) -> None:
        open_store(self.cluster.store).write(OWNER_KEY, RUN.encode())

    @property
    def in_flight(self) -> int:
        return self.submitted - self.finished

    @property
    def running(self) -> int:
        """Executions that hold a lease. The lease of one that has just ended may still be renewed once."""
        leases: int = self.cluster.redis.hlen(redis_keys.LEASES)  # pyright: ignore[reportAssignmentType]
        return min(leases, self.in_flight)

    def top_up(self, environment: str, concurrency: int) -> None:
        """Submit jobs until `concurrency` are in flight, and read replies."""
        missing = [self._job(environment) for _ in range(concurrency - self.in_flight)]
        if missing:
            self.cluster.redis.lpush(Queue.ROLLOUTS, *(envelope.encode(play.STAGE, job) for job in missing))
        self.read()

    def drained(self) -> bool:
        """Read replies without submitting; whether none is in flight."""
        self.read()
        return not self.in_flight

    def read(self) -> None:
        streams: Any = self.cluster.redis.xread(
            {redis_keys.replies(RUN): self._position}, count=REPLIES_AT_ONCE, block=WAIT_MS
        )
        for position, fields in streams[0][1] if streams else []:
            self._position = position
            self._settle(orjson.loads(fields[b"reply"]))
        if streams:
            self.cluster.redis.xtrim(redis_keys.replies(RUN), minid=self._position)

    def _settle(self, reply: dict[str, Any]) -> None:
        if reply["job"] not in self._open:
            return
        self._open.remove(reply["job"])
        result = reply["result"]
        if reply["outcome"] != "done" or result["policy_error"] != self.policy_error:
            raise RunError(f"a rollout ended with an unexpected outcome: {reply}")
        self.finished += 1
        if result["columns"]:
            # file of columns -> directory of the execution -> directory of the rollout
            shutil.rmtree(Path(self.cluster.directory, "store", result["columns"]["key"]).parent.parent)

    def _job(self, environment: str) -> play.PlayMessage:
        self.submitted += 1
        job = f"r{self.submitted:08d}"
        self._open.add(job)
        return play.PlayMessage(
            run=RUN,
            job=job,
            attempt=1,
            sequence=self.submitted,
            timeout_s=TIMEOUT_S,
            environment=environment,
            example=self.submitted % 1000,
            seed=self.submitted % SEEDS,
        )

"""Rollouts for one worker, without an orchestrator: real messages in, real replies out, as many under way as asked.

What a rollout leaves in the store is deleted when its reply is read, as if its step had been released.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from bench.cluster import Cluster
from penstock import redis_keys
from penstock.errors import RunError
from penstock.messages import Queue, RolloutJob
from tasks import envelope

RUN = "feed"
TIMEOUT_S = 600.0
REPLIES_AT_ONCE = 256
WAIT_MS = 20
"""for replies, in one look: whoever feeds looks at other things in between"""
SEEDS = 1 << 31


@dataclass(kw_only=True)
class Feed:
    cluster: Cluster
    policy_error: str | None = None
    """how its rollouts are to end"""
    submitted: int = 0
    finished: int = 0
    _position: str = field(default="0-0", init=False)

    @property
    def under_way(self) -> int:
        return self.submitted - self.finished

    @property
    def running(self) -> int:
        """Executions that hold a lease; one that has just ended may be renewed once more."""
        leases: int = self.cluster.redis.hlen(redis_keys.LEASES)  # pyright: ignore[reportAssignmentType]
        return min(leases, self.under_way)

    def keep(self, environment: str, at_once: int) -> None:
        """Submit what is missing, read what has ended."""
        missing = [self._job(environment) for _ in range(at_once - self.under_way)]
        if missing:
            self.cluster.redis.lpush(Queue.ROLLOUTS, *(envelope.encode(job) for job in missing))
        self.read()

    def drained(self) -> bool:
        """Reads, submits nothing."""
        self.read()
        return not self.under_way

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
        result = reply["result"]
        if reply["outcome"] != "done" or result["policy_error"] != self.policy_error:
            raise RunError(f"a rollout came to a wrong end: {reply}")
        self.finished += 1
        if result["columns"]:
            # columns -> execution -> rollout
            shutil.rmtree(Path(self.cluster.directory, "store", result["columns"]["key"]).parent.parent)

    def _job(self, environment: str) -> RolloutJob:
        self.submitted += 1
        return RolloutJob(
            run=RUN,
            job=f"r{self.submitted:08d}",
            attempt=1,
            sequence=self.submitted,
            timeout_s=TIMEOUT_S,
            group="g",
            environment=environment,
            example=self.submitted % 1000,
            seed=self.submitted % SEEDS,
        )

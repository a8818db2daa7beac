"""From what a body did to the reply that the orchestrator reads."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from penstock import ids, redis_keys
from penstock.errors import BlobUnwritten, EngineUnreachable, PolicyFailure
from penstock.messages import AnyJob, AnyResult, Outcome, Reply, RolloutJob, RolloutResult, shortened

End = tuple[str, int]
"""a key that was written, and the seconds after which it goes, should nobody remove it"""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One execution of one message; its id keeps a message that was delivered twice apart from itself."""

    job: AnyJob
    worker: str
    id: str = field(default_factory=ids.new_execution)

    @property
    def lease(self) -> str:
        return str(ids.LeaseId(self.job.run, self.job.job, self.job.attempt, self.id))

    def reply(self, outcome: Outcome, *, result: AnyResult | None = None, error: str | None = None) -> Reply:
        job = self.job
        return Reply(
            run=job.run, job=job.job, attempt=job.attempt, execution=self.id, worker=self.worker,
            outcome=outcome, result=result, error=shortened(error) if error else None,
        )  # fmt: skip

    def failed(self, error: BaseException) -> Reply:
        """A failed rollout is data: what the policy did wrong is a result, what the pipe did wrong is tried again."""
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, asyncio.CancelledError | SystemExit | KeyboardInterrupt):
            return self.reply(Outcome.RELEASED, error=text)
        if isinstance(error, EngineUnreachable):
            return self.reply(Outcome.UNREACHABLE, error=text)
        if isinstance(error, BlobUnwritten):
            return self.reply(Outcome.UNWRITTEN, error=text)
        if isinstance(self.job, RolloutJob) and isinstance(error, PolicyFailure | TimeoutError):
            name = "timeout" if isinstance(error, TimeoutError) else type(error).__name__
            return self.reply(Outcome.DONE, result=RolloutResult(reward=0.0, policy_error=name), error=text)
        return self.reply(Outcome.FAILED, error=text)


def take_lease(pipe: Any, lease: str, value: str) -> End:
    pipe.hset(redis_keys.LEASES, lease, value)
    return redis_keys.LEASES, redis_keys.LEASES_TTL_S


def send(pipe: Any, reply: Reply, lease: str) -> End:
    """The reply first: a crash between the two leaves a reply and an expiring lease, and the reply wins."""
    stream = redis_keys.replies(reply.run)
    pipe.xadd(stream, {"reply": reply.model_dump_json()})
    pipe.hdel(redis_keys.LEASES, lease)
    return stream, redis_keys.REPLIES_TTL_S

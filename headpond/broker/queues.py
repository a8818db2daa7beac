"""The queues of jobs by their names in Redis, and the two kinds of workers with their queues and
commands."""

from enum import StrEnum


class Queue(StrEnum):
    ROLLOUTS = "rollouts"
    FILTERING = "filtering"
    ADVANTAGES = "advantages"
    ENCODING = "encoding"


class WorkerKind(StrEnum):
    ROLLOUTS = "rollouts"
    COMPUTE = "compute"

    @property
    def queues(self) -> tuple[Queue, ...]:
        return tuple(queue for queue in Queue if WorkerKind.of(queue) is self)

    @property
    def command(self) -> str:
        slots = {WorkerKind.ROLLOUTS: 256, WorkerKind.COMPUTE: 4}[self]
        return f"celery -A headpond.workers.{self} worker -Q {','.join(self.queues)} -c {slots}"

    @classmethod
    def of(cls, queue: Queue) -> "WorkerKind":
        return cls.ROLLOUTS if queue is Queue.ROLLOUTS else cls.COMPUTE

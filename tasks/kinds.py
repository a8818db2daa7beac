"""The two kinds of workers: the queues that each serves, and the command that starts one."""

from enum import StrEnum

from penstock.messages import Queue


class WorkerKind(StrEnum):
    ROLLOUTS = "rollouts"
    COMPUTE = "compute"

    @property
    def queues(self) -> tuple[Queue, ...]:
        return tuple(queue for queue in Queue if WorkerKind.of(queue) is self)

    @property
    def command(self) -> str:
        slots = {WorkerKind.ROLLOUTS: 256, WorkerKind.COMPUTE: 4}[self]
        return f"celery -A workers.{self} worker -Q {','.join(self.queues)} -c {slots}"

    @classmethod
    def of(cls, queue: Queue) -> "WorkerKind":
        return cls.ROLLOUTS if queue is Queue.ROLLOUTS else cls.COMPUTE

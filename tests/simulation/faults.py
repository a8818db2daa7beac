"""The faults of a schedule: each is a function of the world and a seeded random number generator."""

import errno
import signal
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import orjson

from headpond import ids
from headpond.broker import redis_keys
from headpond.broker.queues import Queue, WorkerKind
from headpond.orchestrator.duties import crash_points
from headpond.records.rollout import RolloutResult
from headpond.store import BlobRef
from headpond.tasks.stage import Outcome, Reply
from headpond.tasks.stages.encode import EncodeResult
from simulation.workers import MOMENTS, SimulatedWorker

if TYPE_CHECKING:
    from simulation.world import World

FAULTS: dict[str, Callable[["World", Random], object]] = {}
HOUR_S = 3600.0
OTHER_RUN = "0" * 12
"""whose messages a worker executes if it finds them before the orchestrator"""


@dataclass(frozen=True)
class Fault:
    number: int
    """its place in the schedule, by which a replay names it"""
    at_s: float
    name: str
    seed: int

    def inject(self, world: "World") -> None:
        FAULTS[self.name](world, Random(self.seed))

    def __str__(self) -> str:
        return f"{self.number}: {self.name} at {self.at_s:.1f} s"


def drawn(random: Random) -> list[Fault]:
    """One to six faults, most of them while the run is busy."""
    names = sorted(FAULTS)
    number = random.choice([1, 2, 2, 3, 3, 4, 5, 6])
    return [
        Fault(each, round(random.uniform(0, 25), 2), random.choice(names), random.getrandbits(32))
        for each in range(number)
    ]


def fault(inject: Callable[["World", Random], object]) -> Callable[["World", Random], object]:
    FAULTS[inject.__name__] = inject
    return inject


# the orchestrator


@fault
def orchestrator_killed(world: "World", random: Random) -> None:
    world.kill_orchestrator()


@fault
def orchestrator_killed_at_point(world: "World", random: Random) -> None:
    world.crash_at = [random.choice(crash_points.POINTS), random.randint(1, 4)]


@fault
def orchestrator_killed_in_disk_call(world: "World", random: Random) -> None:
    world.disk.kill_after = random.randint(0, 80)


@fault
def orchestrator_killed_at_commit(world: "World", random: Random) -> None:
    world.disk.kill_at_commit = random.choice(["before", "after"])


@fault
def orchestrator_killed_often(world: "World", random: Random) -> None:
    for _ in range(5):
        world.later(random.uniform(0, 10), world.kill_orchestrator)


@fault
def orchestrator_drained(world: "World", random: Random) -> None:
    world.signal_orchestrator(signal.SIGINT)


@fault
def orchestrator_stopped(world: "World", random: Random) -> None:
    world.signal_orchestrator(signal.SIGINT)
    world.later(random.uniform(0, 3), lambda: world.signal_orchestrator(signal.SIGINT))


@fault
def orchestrator_paused(world: "World", random: Random) -> None:
    world.orchestrator.pause(world.lasting(random, 30))


@fault
def settings_changed(world: "World", random: Random) -> None:
    world.change_settings(random)


@fault
def ledger_lost(world: "World", random: Random) -> None:
    """With its machine: the next start rebuilds it from the manifests."""
    world.lose_ledger()


@fault
def clock_jumps(world: "World", random: Random) -> None:
    world.wall_offset_s += random.choice([-HOUR_S, HOUR_S])


# disks


@fault
def orchestrator_disk_fails(world: "World", random: Random) -> None:
    _disk_fails(world, world.disk, random)


@fault
def worker_disk_fails(world: "World", random: Random) -> None:
    worker = random.choice(world.workers)
    _disk_fails(world, world.disk_of(worker.process), random)


@fault
def every_disk_is_full(world: "World", random: Random) -> None:
    seconds = world.lasting(random, 20)
    for process in (world.orchestrator, *(worker.process for worker in world.workers)):
        world.disk_of(process).fail(errno.ENOSPC, seconds=seconds, rate=1.0)


def _disk_fails(world: "World", disk: Any, random: Random) -> None:
    error = random.choice([errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EBUSY])
    disk.fail(error, seconds=world.lasting(random, 15), rate=random.choice([0.02, 0.2, 1.0]))


@fault
def orchestrator_disk_does_not_sync(world: "World", random: Random) -> None:
    """A manifest is linked, and the sync of its directory fails: a trainer sees it before it is sealed."""
    error, seconds = random.choice([errno.EIO, errno.EDQUOT]), world.lasting(random, 25)
    world.disk.fail(error, seconds=seconds, rate=random.choice([0.3, 0.6]), calls=("fsync",))


@fault
def ledger_disk_fails(world: "World", random: Random) -> None:
    world.disk.ledger_until = world.loop.now + world.lasting(random, 10)


@fault
def columns_damaged(world: "World", random: Random) -> None:
    """A file that no manifest and no open step names: the filter or the encoder must find it."""
    files = world.undelivered_columns()
    if files:
        path = random.choice(files)
        path.unlink() if random.random() < 0.5 else path.write_bytes(path.read_bytes()[:-1] + b"?")


# Redis


@fault
def redis_away(world: "World", random: Random) -> None:
    world.redis.away_until = world.loop.now + world.lasting(random, 20)


@fault
def redis_silent(world: "World", random: Random) -> None:
    world.redis.silent_until = world.loop.now + world.lasting(random, 20)


@fault
def redis_flushed(world: "World", random: Random) -> None:
    world.redis.flush()


@fault
def redis_restarted_empty(world: "World", random: Random) -> None:
    redis_away(world, random)
    world.redis.flush()
    world.redis.clock_skew_s += random.choice([-HOUR_S, 0.0, HOUR_S])


@fault
def redis_out_of_memory(world: "World", random: Random) -> None:
    world.redis.full_until = world.loop.now + world.lasting(random, 20)


@fault
def redis_clock_jumps(world: "World", random: Random) -> None:
    world.redis.clock_skew_s += random.choice([-HOUR_S, HOUR_S])


@fault
def messages_delivered_twice(world: "World", random: Random) -> None:
    for queue in Queue:
        if messages := world.redis.lrange(queue, 0, -1):
            world.redis.rpush(queue, *messages)


@fault
def queues_purged(world: "World", random: Random) -> None:
    world.redis.delete(*Queue)


@fault
def messages_of_another_run(world: "World", random: Random) -> None:
    for queue in Queue:
        for message in world.redis.lrange(queue, 0, -1):
            world.redis.lpush(queue, message.replace(world.run.encode(), OTHER_RUN.encode()))
        world.redis.lpush(queue, b"{}", b"\xff", orjson.dumps({"headers": {"id": "a.b.1"}}))
    world.orchestrator.kill()  # its next start removes them


# replies


@fault
def replies_repeated(world: "World", random: Random) -> None:
    for_some(world, random, lambda worker, on: setattr(worker.behaviour, "repeats_replies", on))


@fault
def replies_late(world: "World", random: Random) -> None:
    late_s = random.choice([1.0, 10.0, 30.0])
    for_some(world, random, lambda worker, on: setattr(worker.behaviour, "late_s", late_s if on else 0.0))


@fault
def replies_replayed(world: "World", random: Random) -> None:
    """Old ones again, in another order."""
    if replies := world.replies_sent:
        for content in random.choices(replies, k=min(20, len(replies))):
            world.redis.xadd(redis_keys.replies(world.run), {"reply": content})


@fault
def replies_forged(world: "World", random: Random) -> None:
    """Malformed, of another run, of no job, with files of another rollout, with manifests among their files."""
    stream = redis_keys.replies(world.run)
    for fields in ({"reply": b"{"}, {"reply": b"\xff\xfe"}, {"other": b"1"}, {"reply": b"{}"}):
        world.redis.xadd(stream, fields)
    forged = {"execution": "0" * 12, "worker": "forger-1", "node": "forger", "settings": "", "outcome": Outcome.DONE}
    columns = world.undelivered_columns() + world.delivered_columns()
    keys = [path.relative_to(world.store_root).as_posix() for path in columns] + ["batches/step_000000/manifest.json"]
    for key in random.sample(keys, k=min(5, len(keys))):
        blob = BlobRef(key=key, size=1, checksum="0")
        for job in (f"{ids.GroupId(random.randint(1, 9))}-{random.randint(0, 3)}", "g0000001-filter", "s000000f1r0"):
            reply = Reply(
                stage="play",
                run=world.run,
                job=job,
                attempt=1,
                result=RolloutResult(reward=1e9, columns=blob),
                **forged,
            )
            world.redis.xadd(stream, {"reply": reply.model_dump_json()})
    for job in ("s000000f1r0", "s000001f1r0"):
        reply = Reply(
            stage="encode", run=world.run, job=job, attempt=1, result=EncodeResult(unreadable=("g0000001-0",)), **forged
        )
        world.redis.xadd(stream, {"reply": reply.model_dump_json()})


# workers


def for_some(world: "World", random: Random, switch: Callable[[SimulatedWorker, bool], None]) -> None:
    """One worker or all, those that are started meanwhile included."""
    everyone, seconds = random.random() < 0.4, world.lasting(random, 25)
    chosen = random.choice(world.workers)
    world.switch_behaviour((lambda worker: everyone or worker is chosen), switch, seconds)


@fault
def worker_killed(world: "World", random: Random) -> None:
    worker = random.choice(world.workers)
    world.replace_worker(worker)
    worker.process.kill()


@fault
def worker_dies_at_moment(world: "World", random: Random) -> None:
    random.choice(world.workers).behaviour.dies_at = random.choice(MOMENTS)


@fault
def worker_paused(world: "World", random: Random) -> None:
    random.choice(world.workers).process.pause(world.lasting(random, 30))


@fault
def worker_stopped(world: "World", random: Random) -> None:
    """It gives its jobs back."""
    worker = random.choice(world.workers)
    world.replace_worker(worker)
    worker.stopping = True
    for task in worker.running.values():
        task.cancel()


@fault
def worker_fails_everything(world: "World", random: Random) -> None:
    for_some(world, random, lambda worker, on: setattr(worker.behaviour, "fails", on))


@fault
def worker_slow(world: "World", random: Random) -> None:
    for_some(world, random, lambda worker, on: setattr(worker.behaviour, "slow", 8.0 if on else 1.0))


@fault
def worker_has_other_settings(world: "World", random: Random) -> None:
    kind = random.choice(list(WorkerKind))
    setting = {"policy": {"max_turns": 3}} if kind is WorkerKind.ROLLOUTS else {"vocab_size": 1000}
    world.add_worker(kind, config=world.with_settings(setting))


@fault
def engine_away(world: "World", random: Random) -> None:
    for_some(world, random, lambda worker, on: setattr(worker.behaviour, "engine_away", on))


@fault
def everything_is_dropped(world: "World", random: Random) -> None:
    seconds = world.lasting(random, 40)
    switch = lambda worker, on: setattr(worker.behaviour, "drops_everything", on)  # noqa: E731
    world.switch_behaviour(lambda worker: True, switch, seconds)


@fault
def nothing_is_encoded(world: "World", random: Random) -> None:
    seconds = world.lasting(random, 40)
    switch = lambda worker, on: setattr(worker.behaviour, "encodes_nothing", on)  # noqa: E731
    world.switch_behaviour(lambda worker: True, switch, seconds)


# the trainer


@fault
def trainer_set_back(world: "World", random: Random) -> None:
    world.trainer.set_back()


@fault
def trainer_silent(world: "World", random: Random) -> None:
    world.trainer.silent_until = world.loop.now + world.lasting(random, 40)

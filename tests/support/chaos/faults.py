"""The faults of the schedules, by name. A fault begins, waits for its effect and yields; afterwards it is repaired.

Those in HELD may last until the fault after them is repaired.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from headpond.batches.signals import NOTHING, read_trainer
from support.chaos.world import WORLDS, AgentWorld, EngineWorld, NoopWorld, World
from support.cluster import BIN, Process
from support.fault_shim import HOUR_S, WRITING, Calls, Faults
from support.partitions import Direction
from support.small_disk import filled
from support.waiting import POLL_S

Fault = Callable[[Any], AbstractContextManager[None]]
FAULTS: dict[str, Fault] = {}
"""name -> fault"""
IN_WORLDS: dict[str, list[str]] = {}
"""name -> the worlds that it can be played in"""
HELD = {"bad_host", "host_without_store", "delay_orchestrator", "delay_workers"}
DELAY_S = 0.2
WRITERS = ("orchestrator", "rollouts", "compute", "sessions")
FAILING_S = 2.0
FAILING_TRIES = 3
STALLED_S = 1.5
ANSWERED_S = 5.0  # the time-out of a command to Redis, in every process


def fault(world: type[World] = World) -> Callable[[Callable[[Any], Iterator[None]]], None]:
    def add(function: Callable[[Any], Iterator[None]]) -> None:
        name = getattr(function, "__name__", "")
        FAULTS[name] = contextmanager(function)
        IN_WORLDS[name] = [each for each, kind in WORLDS.items() if issubclass(kind, world)]

    return add


# workers


@fault()
def kill_worker(world: World) -> Iterator[None]:
    killed = world.workers.pop(0)
    killed.kill()
    world.workers.append(world.rollout_worker())
    yield


@fault()
def stop_worker(world: World) -> Iterator[None]:
    stopping = world.workers.pop(0)
    stopping.signal(world.random.choice([signal.SIGTERM, signal.SIGQUIT]))
    world.workers.append(world.rollout_worker())
    yield
    stopping.wait()


@fault()
def pause_worker(world: World) -> Iterator[None]:
    before = world.lost()
    with _paused(world.workers[0]):
        world.until(lambda: world.lost() > before)
        yield


@fault()
def wedge_worker(world: World) -> Iterator[None]:
    """Rollouts block the event loops of both workers."""
    before = world.lost()
    world.wedge.touch()
    world.until(lambda: world.lost() > before)
    yield
    world.wedge.unlink()


@fault()
def kill_compute(world: World) -> Iterator[None]:
    world.compute.kill()
    world.compute = world.compute_worker()
    yield


@fault()
def bad_host(world: World) -> Iterator[None]:
    """A rollout worker with the configuration of another run."""
    other = world.directory / "other.toml"
    other.write_text('[environments.other]\nuse = "noop"\n')
    bad = world.rollout_worker(HEADPOND_CONFIG=str(other))
    world.until(lambda: "action=refused" in bad.text)
    yield
    assert "headpond.rollouts" not in bad.text.partition("ready.")[2], f"it took jobs:\n{bad.text[-3000:]}"
    bad.kill()


@fault()
def host_without_store(world: World) -> Iterator[None]:
    """A compute worker with the right settings, and a directory of its own instead of the store."""
    bad = world.compute_worker(HEADPOND_STORE=(world.directory / "elsewhere").as_uri())
    world.until(lambda: "elsewhere" in bad.text)
    yield
    bad.kill()


# the orchestrator


@fault()
def kill_orchestrator(world: World) -> Iterator[None]:
    world.run.kill()
    world.run = world.orchestrator()
    yield


@fault()
def pause_orchestrator(world: World) -> Iterator[None]:
    with _paused(world.run):
        world.until(lambda: world.cluster.redis.llen("rollouts") == 0)
        yield


@fault()
def drain_orchestrator(world: World) -> Iterator[None]:
    world.drain()
    world.run = world.orchestrator()
    yield


@fault()
def change_a_setting_of_the_run(world: World) -> Iterator[None]:
    """One that may change at a resume, and that no worker reads."""
    most = 10 * world.random.randrange(8, 16)
    world.drain()
    world.configure(rollouts=world.changed.get("rollouts", {}) | {"max_in_flight": most})
    world.run = world.orchestrator()
    world.until(lambda: "action=setting_changed" in world.run.text)
    yield


@fault()
def change_a_setting_of_workers(world: World) -> Iterator[None]:
    """Running workers do not have it: they are refused until they are restarted."""
    world.drain()
    world.configure(recovery={"lease_s": 2.0 + world.random.random()})
    world.run = world.orchestrator()
    world.until(lambda: "action=refused" in world.compute.text)
    world.restart_workers()
    yield


# Redis


@fault()
def kill_redis(world: World) -> Iterator[None]:
    world.cluster.redis_server.kill()
    yield
    with world.redis_variables():
        world.cluster.redis_server.restart()


@fault()
def flush_redis(world: World) -> Iterator[None]:
    world.cluster.redis.flushall()
    yield


@fault()
def fill_redis(world: World) -> Iterator[None]:
    """Out of memory, with the policy that evicts nothing: every write is refused."""
    world.cluster.redis.config_set("maxmemory", 1)
    world.until(lambda: world.waits_for("Redis"))
    yield
    world.cluster.redis.config_set("maxmemory", 0)


@fault()
def reset_connections(world: World) -> Iterator[None]:
    for kind in ("normal", "pubsub"):
        world.cluster.redis.client_kill_filter(_type=kind, skipme=True)
    yield


@fault()
def deliver_twice(world: World) -> Iterator[None]:
    messages = world.cluster.redis.lrange("rollouts", 0, -1)
    if messages:
        world.cluster.redis.rpush("rollouts", *messages)
    yield


@fault()
def purge_queues(world: World) -> Iterator[None]:
    queues = "rollouts,filtering,advantages,encoding"
    command = [str(BIN / "celery"), "-A", "headpond.tasks", "purge", "-f", "-Q", queues]
    purge = world.cluster.start("purge", *command, HEADPOND_REDIS_URL=world.cluster.redis_server.url)
    assert purge.wait() == 0, purge.text
    yield


# the network


@fault()
def delay_orchestrator(world: World) -> Iterator[None]:
    with _delayed(world, "orchestrator"):
        yield


@fault()
def delay_workers(world: World) -> Iterator[None]:
    with _delayed(world, "rollouts", "compute"):
        yield


@fault()
def cut_orchestrator(world: World) -> Iterator[None]:
    """Until a command to Redis has timed out."""
    with _cut(world, "orchestrator"):
        world.until(lambda: world.waits_for("Redis"), most_s=ANSWERED_S + 3)
        yield


@fault()
def cut_workers(world: World) -> Iterator[None]:
    before = world.lost()
    with _cut(world, world.random.choice(["rollouts", "compute"])):
        stalls = _stalls(world)
        world.until(lambda: world.lost() > before or stalls())
        yield


@contextmanager
def _delayed(world: World, *roles: str) -> Iterator[None]:
    generated = world.generated()
    for role in roles:
        world.link[role].delay_s = DELAY_S
    world.until(lambda: world.generated() > generated + world.group_size)
    yield
    for role in roles:
        world.link[role].delay_s = 0.0


@contextmanager
def _cut(world: World, role: str) -> Iterator[None]:
    world.link[role].cut(world.random.choice([Direction.THERE, Direction.BACK, Direction.BOTH]))
    yield
    world.link[role].cut(Direction.NONE)


# clocks


@fault()
def clock_forward(world: World) -> Iterator[None]:
    _jump(world, HOUR_S)
    yield


@fault()
def clock_back(world: World) -> Iterator[None]:
    _jump(world, -HOUR_S)
    yield


def _jump(world: World, seconds: float) -> None:
    """The clock of one kind of process, Redis included; it stays there."""
    world.faults[world.random.choice(world.roles)].jump(seconds)


# files


@fault()
def fill_disk(world: World) -> Iterator[None]:
    """The disk of the ledger and the store."""
    with _full(world):
        world.until(lambda: world.waits_for("cannot be written") or world.waits_for("store"))
        yield


@contextmanager
def _full(world: World) -> Iterator[None]:
    if not world.mounted:
        with ExitStack() as stack:
            for faults in world.faults.values():
                stack.enter_context(faults.failing("ENOSPC", Calls.WRITE, world.disk))
            yield
        return
    with filled(world.disk):
        yield


def _failing(error: str) -> Callable[[World], Iterator[None]]:
    def fails(world: World) -> Iterator[None]:
        """Of one kind of process, until some calls have failed; another one, if it makes no such call."""
        for _ in range(FAILING_TRIES - 1):
            with _drawn_calls(world, error) as shim:
                if _wait_failed(world, shim):
                    yield
                    return
        with _drawn_calls(world, error) as shim:
            world.until(lambda: shim.failed, most_s=FAILING_S)
            yield

    fails.__name__ = f"files_{error.lower()}"
    return fails


def _wait_failed(world: World, shim: Faults) -> bool:
    enough = world.random.randrange(1, 12)
    give_up_at = time.monotonic() + FAILING_S
    while shim.failed < enough and time.monotonic() < give_up_at:
        time.sleep(POLL_S)
    return shim.failed > 0


@contextmanager
def _drawn_calls(world: World, error: str) -> Iterator[Faults]:
    role = world.random.choice([role for role in WRITERS if role in world.roles])
    below = world.cluster.store
    if role == "orchestrator" and world.random.random() < 0.4:
        below = world.disk / "ledger"
    calls = world.random.choice([*Calls, Calls.FSYNC | Calls.CLOSE, WRITING, Calls.OPEN | Calls.UNLINK])
    with world.faults[role].failing(error, calls, below, every=world.random.choice([1, 1, 2, 5])):
        yield world.faults[role]


for _error in ("ESTALE", "EIO", "ENOSPC", "EDQUOT"):
    fault()(_failing(_error))


# engine, session server, trainer


@fault(NoopWorld)
def lose_engine(world: NoopWorld) -> Iterator[None]:
    world.engine_down.touch()
    world.until(lambda: world.waits_for("engine"))
    yield
    world.engine_down.unlink()


@fault(EngineWorld)
def kill_engine(world: EngineWorld) -> Iterator[None]:
    world.engine.kill()
    world.until(_stalls(world))
    yield
    world.engine = world.start_engine()


@fault(EngineWorld)
def pause_engine(world: EngineWorld) -> Iterator[None]:
    with _paused(world.engine):
        world.until(_stalls(world))
        yield


@fault(AgentWorld)
def kill_sessions(world: AgentWorld) -> Iterator[None]:
    assert world.sessions
    world.sessions.kill()
    world.until(_stalls(world))
    yield
    world.sessions = world.start_sessions()


@fault(AgentWorld)
def pause_sessions(world: AgentWorld) -> Iterator[None]:
    assert world.sessions
    with _paused(world.sessions):
        world.until(_stalls(world))
        yield


@fault(EngineWorld)
def kill_trainer(world: EngineWorld) -> Iterator[None]:
    """It continues after the last step that it has acknowledged."""
    world.trainer.kill()
    step = world.step()
    world.until(lambda: world.step() > step, most_s=3.0)
    yield
    world.start_trainer(read_trainer(world.cluster.run_dir).acked)


@fault(EngineWorld)
def set_trainer_back(world: EngineWorld) -> Iterator[None]:
    """It resumes from its last checkpoint, and reads the steps after it again."""
    world.trainer.kill()
    checkpoint = read_trainer(world.cluster.run_dir).checkpointed
    trainer = world.start_trainer(max(NOTHING, checkpoint))
    world.until(lambda: '"step"' in trainer.text)
    yield


def _stalls(world: World) -> Callable[[], bool]:
    """Whether no rollout was generated for a while."""
    last = [world.generated(), time.monotonic()]

    def stalls() -> bool:
        now, generated = time.monotonic(), world.generated()
        if generated != last[0]:
            last[:] = [generated, now]
        return now - last[1] > STALLED_S

    return stalls


@contextmanager
def _paused(process: Process) -> Iterator[None]:
    process.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.signal(signal.SIGCONT)

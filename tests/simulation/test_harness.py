"""The simulation itself: its clock, kills and pauses, that a seed decides everything, and that it sees broken code."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headpond.broker import redis_keys
from headpond.broker.queues import WorkerKind
from simulation.loop import Killed, Process, SimulatedLoop
from simulation.playing import play, replay_command
from simulation.workers import SimulatedWorker
from simulation.world import World


def on_simulated_loop(work: Callable[[SimulatedLoop], Any]) -> Any:
    loop = SimulatedLoop(limit_s=1e6)
    try:
        return loop.run_until_complete(work(loop))
    finally:
        loop.close()


def test_time_jumps_to_the_next_timer() -> None:
    async def work(loop: SimulatedLoop) -> list[float]:
        begun, woken = loop.time(), list[float]()

        async def sleeper(seconds: float) -> None:
            await asyncio.sleep(seconds)
            woken.append(loop.time() - begun)

        await asyncio.gather(sleeper(3600), sleeper(0.5), sleeper(60))
        return woken

    assert on_simulated_loop(work) == [0.5, 60, 3600]


def test_a_killed_process_runs_nothing_again() -> None:
    async def work(loop: SimulatedLoop) -> list[str]:
        process, done = Process("p", loop), list[str]()

        async def forever() -> None:
            try:
                await asyncio.sleep(10)
                done.append("went on")
            finally:
                done.append("cleaned up")
                await asyncio.sleep(1)
                done.append("cleaned up later")

        process.start(forever())
        await asyncio.sleep(1)
        process.kill()
        await asyncio.sleep(100)
        return done

    # Closing the coroutine runs it up to its next await: what it calls there is stopped by the redis, disk and threads.
    assert on_simulated_loop(work) == ["cleaned up"]


def test_a_paused_process_goes_on_later() -> None:
    async def work(loop: SimulatedLoop) -> float:
        process, begun = Process("p", loop), loop.time()
        task = process.start(asyncio.sleep(10))
        await asyncio.sleep(1)
        process.pause(30)
        await asyncio.wait([task])
        return loop.time() - begun

    assert on_simulated_loop(work) == 31


def test_a_kill_unwinds_the_code_that_it_hits() -> None:
    async def work(loop: SimulatedLoop) -> list[str]:
        process, done = Process("p", loop), list[str]()

        async def dies() -> None:
            process.kill()
            raise Killed

        process.start(dies())
        process.start(_append_later(done))
        await asyncio.sleep(10)
        return done

    assert on_simulated_loop(work) == []


def test_a_worker_that_dies_is_replaced(tmp_path: Path) -> None:
    """The dying process asks for it."""
    world = World(1, tmp_path)
    process, done = Process("p", world.loop), list[str]()

    async def dies() -> None:
        world.later(1, lambda: done.append("replaced"))
        process.kill()

    process.start(dies())
    world.loop.run_until_complete(asyncio.sleep(10))
    world.loop.close()
    assert done == ["replaced"]


def test_the_end_awaits_a_replaced_worker_that_still_executes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedWorker, "start", lambda _: None)
    world = World(1, tmp_path)
    world.trainer.acked = world.config.steps - 1

    async def work() -> float:
        for _ in range(2):
            world.add_worker(WorkerKind.COMPUTE)
        worker, begun = world.workers[0], world.loop.time()
        world.replace_worker(worker)
        worker.running["t"] = asyncio.create_task(asyncio.sleep(20))
        worker.running["t"].add_done_callback(lambda _: worker.running.clear())
        await world._settled()
        return world.loop.time() - begun

    took_s = world.loop.run_until_complete(work())
    world.loop.close()
    assert took_s >= 20


@pytest.mark.parametrize(("expires", "left"), [(True, []), (False, ["keys are left in Redis: ['headpond:orders']"])])
def test_keys_that_an_outage_leaves_must_expire(tmp_path: Path, expires: bool, left: list[str]) -> None:
    world = World(1, tmp_path, faults=[])
    run_until_done = world._run_until_done

    async def end_in_outage() -> None:
        await run_until_done()
        world.redis.hset(redis_keys.ORDERS, "node", b"{}")
        if expires:
            world.redis.expire(redis_keys.ORDERS, redis_keys.ORCHESTRATOR_TTL_S)
        world.redis.silent_until = world.loop.now + 1

    world._run_until_done = end_in_outage
    assert world.play().violations == left


async def _append_later(done: list[str]) -> None:
    await asyncio.sleep(1)
    done.append("went on")


@pytest.mark.parametrize("seed", [3, 8])
def test_a_seed_decides_everything(tmp_path: Path, seed: int) -> None:
    first, second = (play(seed, tmp_path) for _ in range(2))
    assert (first.notes, first.loop.now, first.replies_sent) == (second.notes, second.loop.now, second.replies_sent)


def test_a_failure_names_its_replay() -> None:
    assert replay_command(7, [0, 2]) == (
        "replay: pytest tests/simulation --simulations 1 --simulation-seed 7 --simulation-faults 0,2"
    )

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_until_async

from penstock.errors import InfrastructureFailure
from penstock.runtime import offload
from penstock.runtime.event_loop import event_loop_factory
from penstock.runtime.offload import Pool, in_cpu_thread, in_file_thread, in_io_thread


def run(main: Callable[[], Coroutine[Any, Any, None]], *, concurrency: int | None = None) -> None:
    with asyncio.Runner(loop_factory=event_loop_factory(concurrency=concurrency)) as runner:
        runner.run(main())


def penstock_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock-")]


def test_each_pool_names_its_threads() -> None:
    async def main() -> None:
        assert (await in_io_thread(threading.current_thread)).name.startswith("penstock-io")
        assert (await in_cpu_thread(threading.current_thread)).name.startswith("penstock-cpu")
        assert (await in_file_thread(threading.current_thread)).name.startswith("penstock-files")

    run(main)


def test_arguments_results_and_errors_pass_through() -> None:
    async def main() -> None:
        assert await in_io_thread(int, "ff", base=16) == 255
        with pytest.raises(ZeroDivisionError):
            await in_cpu_thread(divmod, 1, 0)

    run(main)


@pytest.mark.parametrize(("concurrency", "threads"), [(3, 6), (256, 512), (1000, 512)])
def test_the_io_pool_is_the_default_executor_with_two_threads_per_job_up_to_a_bound(
    concurrency: int, threads: int
) -> None:
    async def main() -> None:
        assert (await asyncio.to_thread(threading.current_thread)).name.startswith("penstock-io")
        assert offload.install(asyncio.get_running_loop(), concurrency=concurrency).threads == threads

    run(main, concurrency=concurrency)


def test_the_cpu_pool_has_one_thread_per_core() -> None:
    async def main() -> None:
        pool = offload.install(asyncio.get_running_loop())
        assert pool.cpu.threads == offload.cores()

    run(main)


@pytest.mark.parametrize(("concurrency", "threads"), [(1, 2), (1000, offload.FILE_THREADS)])
def test_the_file_pool_is_small_at_any_concurrency(concurrency: int, threads: int) -> None:
    async def main() -> None:
        assert offload.install(asyncio.get_running_loop(), concurrency=concurrency).files.threads == threads

    run(main)


@pytest.mark.parametrize(("content", "quota"), [("150000 100000", 2), ("20000 100000", 1), ("max 100000", 1_000_000)])
def test_cores_are_limited_by_affinity_and_container_quota(tmp_path: Path, content: str, quota: int) -> None:
    (tmp_path / "cpu.max").write_text(content)
    affinity = len(os.sched_getaffinity(0))
    assert offload.cores(tmp_path / "cpu.max") == min(affinity, quota)
    assert offload.cores(tmp_path / "missing") == affinity


@pytest.mark.parametrize("in_thread", [in_io_thread, in_cpu_thread, in_file_thread])
def test_context_variables_are_passed_to_the_thread(in_thread) -> None:
    variable = contextvars.ContextVar("variable", default="unset")

    async def main() -> None:
        variable.set("set by the caller")
        assert await in_thread(variable.get) == "set by the caller"

    run(main)


def test_callers_wait_while_all_threads_are_busy() -> None:
    async def main() -> None:
        gate, order = threading.Event(), []
        threads = offload.install(asyncio.get_running_loop(), concurrency=1).threads
        running = [asyncio.create_task(in_io_thread(gate.wait)) for _ in range(threads)]
        waiting = [asyncio.create_task(in_io_thread(order.append, n)) for n in range(100)]
        await wait_until_async(lambda: len(penstock_threads()) == threads, what="every thread is taken")
        assert order == []
        gate.set()
        await asyncio.gather(*running, *waiting)
        assert sorted(order) == list(range(100))

    run(main)


def test_a_function_cancelled_while_waiting_never_runs() -> None:
    async def main() -> None:
        gate, ran = threading.Event(), []
        offload.install(asyncio.get_running_loop(), concurrency=1)
        running = [asyncio.create_task(in_io_thread(gate.wait)) for _ in range(2)]
        waiting = asyncio.create_task(in_io_thread(ran.append, "cancelled"))
        await wait_until_async(lambda: len(penstock_threads()) == 2, what="both threads are taken")
        waiting.cancel()
        gate.set()
        await asyncio.gather(*running)
        await in_io_thread(ran.append, "later")
        assert ran == ["later"]

    run(main)


class Held:
    """A function that runs until it is released."""

    def __init__(self) -> None:
        self.started, self.released, self.ended = threading.Event(), threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.started.set()
        assert self.released.wait(30)
        self.ended.set()


def test_a_function_cancelled_while_running_keeps_its_thread_until_it_ends() -> None:
    async def main() -> None:
        held = Held()
        with Pool(name="cpu", threads=1) as pool:
            first = asyncio.create_task(pool.run(held))
            await wait_until_async(held.started.is_set)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert not held.ended.is_set()
            second = asyncio.create_task(pool.run(held.ended.is_set))
            await asyncio.sleep(0)
            held.released.set()
            assert await second, "it ran concurrently with the first on a pool of one thread"

    run(main)


def test_closing_the_runner_shuts_down_all_pools_and_waits_for_abandoned_calls() -> None:
    held = Held()

    async def main() -> None:
        await in_io_thread(int)
        await in_file_thread(int)
        abandoned = asyncio.create_task(in_cpu_thread(held))
        await wait_until_async(held.started.is_set)
        abandoned.cancel()
        asyncio.get_running_loop().call_soon(held.released.set)

    run(main)
    assert held.ended.is_set()
    assert penstock_threads() == []


def test_a_pool_refuses_calls_after_shutdown() -> None:
    async def main() -> None:
        pool = Pool(name="cpu", threads=1)
        pool.shutdown()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="after shutdown"):
                await pool.run(int)

    run(main)


def test_pools_of_closed_loops_are_dropped() -> None:
    async def main() -> None:
        await in_io_thread(int)

    for _ in range(3):
        run(main)
    assert len(offload._pools) == 1


def test_a_pool_with_stuck_threads_refuses_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BACKLOG_MAX", 3)

    async def main() -> None:
        gate = threading.Event()
        loop = asyncio.get_running_loop()
        pool = offload.install(loop, concurrency=1)
        running = [loop.run_in_executor(None, gate.wait) for _ in range(2)]
        await wait_until_async(lambda: pool._work_queue.empty(), what="both threads have taken their call")
        waiting = [loop.run_in_executor(None, int) for _ in range(3)]
        with pytest.raises(InfrastructureFailure, match="3 calls waiting for its 2 threads"):
            loop.run_in_executor(None, int)
        gate.set()
        await asyncio.gather(*running, *waiting)

    run(main)

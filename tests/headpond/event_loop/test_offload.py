import asyncio
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_until_async

from headpond.errors import InfrastructureFailure
from headpond.event_loop import offload
from headpond.event_loop.factory import event_loop_factory
from headpond.event_loop.offload import FilePool, Pool, in_cpu_thread, in_file_thread, in_io_thread


def run(main: Callable[[], Coroutine[Any, Any, None]], *, concurrency: int | None = None) -> None:
    with asyncio.Runner(loop_factory=event_loop_factory(concurrency=concurrency)) as runner:
        runner.run(main())


def headpond_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("headpond-")]


def test_each_pool_names_its_threads() -> None:
    async def main() -> None:
        assert (await in_io_thread(threading.current_thread)).name.startswith("headpond-io")
        assert (await in_cpu_thread(threading.current_thread)).name.startswith("headpond-cpu")
        assert (await in_file_thread(threading.current_thread)).name.startswith("headpond-files")

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
        assert (await asyncio.to_thread(threading.current_thread)).name.startswith("headpond-io")
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
        await wait_until_async(lambda: len(headpond_threads()) == threads, what="every thread is taken")
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
        await wait_until_async(lambda: len(headpond_threads()) == 2, what="both threads are taken")
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


async def held_in(pool: Pool) -> tuple[Held, "asyncio.Task[None]"]:
    """A function that a thread of the pool runs by now, and its caller."""
    held = Held()
    caller = asyncio.create_task(pool.run(held))
    await wait_until_async(held.started.is_set)
    return held, caller


def test_a_function_cancelled_while_running_keeps_its_thread_until_it_ends() -> None:
    async def main() -> None:
        with Pool(name="cpu", threads=1) as pool:
            held, first = await held_in(pool)
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
    assert headpond_threads() == []


@pytest.mark.parametrize("kind", [Pool, FilePool])
def test_a_pool_refuses_calls_after_shutdown(kind: type[Pool]) -> None:
    async def main() -> None:
        pool = kind(name="cpu", threads=1)
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


def test_small_calls_that_wait_are_run_by_one_thread_in_order_and_wake_the_loop_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for limit in ("SLOW_S", "HELP_S", "DELIVER_S"):
        monkeypatch.setattr(offload, limit, 60.0)
    monkeypatch.setattr(offload, "LOOK_S", 60.0)
    wakes, hand_out = list[int](), FilePool._hand_out

    def counted(pool: FilePool, loop: asyncio.AbstractEventLoop, ended: bool) -> None:
        wakes.append(len(pool._done))
        hand_out(pool, loop, ended)

    monkeypatch.setattr(FilePool, "_hand_out", counted)

    async def main() -> None:
        held, order = Held(), list[int]()
        first = asyncio.create_task(in_file_thread(held))
        await wait_until_async(held.started.is_set)
        waiting = [asyncio.create_task(in_file_thread(order.append, n)) for n in range(100)]
        await asyncio.sleep(0)
        held.released.set()
        await asyncio.gather(first, *waiting)
        assert order == list(range(100))

    run(main)
    assert wakes == [101]


def test_another_thread_runs_the_calls_behind_a_slow_one_up_to_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload, "HELP_S", 60.0)

    async def main() -> None:
        with FilePool(name="files", threads=2) as pool:
            slow, first = await held_in(pool)
            assert await pool.run(int, "7") == 7, "it waited for the slow call"
            slower, second = await held_in(pool)
            third = asyncio.create_task(pool.run(int))
            await asyncio.sleep(3 * offload.LOOK_S)
            assert not third.done()
            assert pool._at_work == 2
            slow.released.set()
            slower.released.set()
            await asyncio.gather(first, second, third)

    run(main)


def test_another_thread_helps_when_quick_calls_wait_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SLOW_S", 60.0)

    async def main() -> None:
        with FilePool(name="files", threads=2) as pool:
            held, first = await held_in(pool)
            assert await pool.run(int, "7") == 7
            held.released.set()
            await first

    run(main)


@pytest.mark.parametrize("deliver_s", [0.0, 60.0], ids=["by the thread", "by the loop"])
def test_a_result_is_not_held_back_by_a_slow_call_behind_it(monkeypatch: pytest.MonkeyPatch, deliver_s: float) -> None:
    monkeypatch.setattr(offload, "DELIVER_S", deliver_s)

    async def main() -> None:
        slow = Held()
        with FilePool(name="files", threads=1) as pool:
            held, first = await held_in(pool)
            quick, last = asyncio.create_task(pool.run(int)), asyncio.create_task(pool.run(slow))
            await asyncio.sleep(0)
            held.released.set()
            async with asyncio.timeout(20):
                await asyncio.gather(first, quick)
            assert not last.done()
            slow.released.set()
            await last

    run(main)


class EmptyError(Exception):
    """As false as an empty list."""

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("in_thread", [in_io_thread, in_file_thread])
def test_any_error_reaches_its_caller_and_holds_nothing_else_back(in_thread: Any) -> None:
    def fail(error: BaseException) -> None:
        raise error

    async def main() -> None:
        errors = [StopIteration(1), EmptyError(), asyncio.CancelledError(), GeneratorExit()]
        calls = [asyncio.create_task(in_thread(fail, error)) for error in errors]
        calls.append(asyncio.create_task(in_thread(int, "7")))
        async with asyncio.timeout(20):
            ended = await asyncio.gather(*calls, return_exceptions=True)
        kinds = [RuntimeError, EmptyError, asyncio.CancelledError, GeneratorExit, int]
        assert [type(each) for each in ended] == kinds
        assert ended[0].__cause__ is errors[0]
        assert await in_thread(int, "7") == 7
        assert offload._pool().files._at_work == 0

    run(main)


def test_a_thread_that_cannot_be_started_fails_no_call_that_another_thread_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload, "HELP_S", 0.0)
    refused = list[str]()

    def refuse(thread: threading.Thread) -> None:
        refused.append(thread.name)
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        with FilePool(name="files", threads=3) as pool:
            with monkeypatch.context() as full:
                full.setattr(threading.Thread, "start", refuse)
                with pytest.raises(RuntimeError, match="can't start"):
                    await pool.run(int)
            held, first = await held_in(pool)
            with monkeypatch.context() as full:
                full.setattr(threading.Thread, "start", refuse)
                waiting = [asyncio.create_task(pool.run(int, "7")) for _ in range(3)]
                await wait_until_async(lambda: len(refused) > 1, what="help was refused")
                held.released.set()
                assert await asyncio.gather(first, *waiting) == [None, 7, 7, 7]
            await wait_until_async(lambda: pool._at_work == 0)
            assert await pool.run(int, "7") == 7

    run(main)


def test_a_small_call_cancelled_while_waiting_never_runs_and_an_error_reaches_its_caller_alone() -> None:
    async def main() -> None:
        ran = list[str]()
        with FilePool(name="files", threads=1) as pool:
            held, first = await held_in(pool)
            cancelled, failing, last = (
                asyncio.create_task(pool.run(ran.append, "cancelled")),
                asyncio.create_task(pool.run(divmod, 1, 0)),
                asyncio.create_task(pool.run(ran.append, "last")),
            )
            await asyncio.sleep(0)
            cancelled.cancel()
            held.released.set()
            with pytest.raises(ZeroDivisionError):
                await failing
            await asyncio.gather(first, last)
            assert ran == ["last"]

    run(main)


def test_small_calls_that_wait_are_limited_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BACKLOG_MAX", 3)

    async def main() -> None:
        with FilePool(name="files", threads=1) as pool:
            held, running = await held_in(pool)
            waiting = [asyncio.create_task(pool.run(int)) for _ in range(3)]
            await asyncio.sleep(0)
            with pytest.raises(InfrastructureFailure, match="3 calls waiting for its 1 threads"):
                await pool.run(int)
            held.released.set()
            await asyncio.gather(running, *waiting)

    run(main)


def test_small_calls_that_wait_when_their_pool_is_shut_down_are_run_or_refused() -> None:
    async def main() -> None:
        pool = FilePool(name="files", threads=1)
        held, running = await held_in(pool)
        pool.shutdown(wait=False)
        waiting = asyncio.create_task(pool.run(int, "3"))
        await asyncio.sleep(0)
        held.released.set()
        assert await asyncio.gather(running, waiting) == [None, 3]
        with pytest.raises(RuntimeError, match="after shutdown"):
            await pool.run(int)

    run(main)

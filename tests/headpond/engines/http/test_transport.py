import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headpond.engines.http.transport import ByteBudget


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_bodies_wait_in_order_until_there_is_room() -> None:
    async def main() -> None:
        budget, order = ByteBudget(100), list[int]()
        leave = [asyncio.Event() for _ in range(4)]

        async def receive(number: int, size: int) -> None:
            with budget.reservation() as reservation:
                await reservation.reserve(size)
                order.append(number)
                await leave[number].wait()

        async with asyncio.TaskGroup() as group:
            for number, size in enumerate([60, 60, 10, 100]):
                group.create_task(receive(number, size))
            await settle()
            assert (order, budget.used, budget.waiting) == ([0], 60, 3)
            leave[0].set()
            await settle()
            assert (order, budget.used, budget.waiting) == ([0, 1, 2], 70, 1)
            leave[1].set()
            await settle()
            assert budget.waiting == 1
            leave[2].set()
            await settle()
            assert (order, budget.used) == ([0, 1, 2, 3], 100)
            leave[3].set()
        assert budget.used == 0

    asyncio.run(main())


def test_of_growing_bodies_the_oldest_is_admitted_first() -> None:
    async def main() -> None:
        budget, done = ByteBudget(100), list[int]()

        async def receive(number: int) -> None:
            with budget.reservation() as reservation:
                for _ in range(8):
                    await reservation.reserve(10)
                    await asyncio.sleep(0)
            done.append(number)

        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(receive(number))
        assert sorted(done) == list(range(20))
        assert budget.used == 0

    asyncio.run(main())


def test_a_cancelled_waiter_lets_the_next_one_in() -> None:
    async def main() -> None:
        budget = ByteBudget(100)

        async def receive(size: int) -> None:
            with budget.reservation() as reservation:
                await reservation.reserve(size)

        with budget.reservation() as held:
            await held.reserve(50)
            large, small = asyncio.create_task(receive(80)), asyncio.create_task(receive(40))
            await settle()
            assert not small.done()
            large.cancel()
            await small
            with pytest.raises(asyncio.CancelledError):
                await large
        assert (budget.used, budget.waiting) == (0, 0)

    asyncio.run(main())


def test_room_for_copies_of_the_largest_body_is_left_free_but_at_most_half() -> None:
    async def main() -> None:
        for copies, fit in ((0, 10), (2, 8), (50, 5)):
            budget = ByteBudget(100, copies=copies)
            with contextlib.ExitStack() as stack:
                for _ in range(fit):
                    await stack.enter_context(budget.reservation()).reserve(10)
                late = stack.enter_context(budget.reservation())
                waiting = asyncio.create_task(late.reserve(10))
                await settle()
                assert not waiting.done()
                waiting.cancel()

    asyncio.run(main())


def test_fragmentation_counts_against_the_budget() -> None:
    async def main() -> None:
        budget = ByteBudget(100, fragmentation=0.25)
        with budget.reservation() as reservation, budget.reservation() as late:
            await reservation.reserve(70)
            waiting = asyncio.create_task(late.reserve(11))
            await settle()
            assert not waiting.done()
            waiting.cancel()
            with budget.reservation() as fitting:
                await fitting.reserve(10)

    asyncio.run(main())


def test_room_for_the_buffers_of_waiting_bodies_is_left_free() -> None:
    async def main() -> None:
        budget = ByteBudget(100, buffered=5)
        with contextlib.ExitStack() as stack:
            await stack.enter_context(budget.reservation()).reserve(60)
            waiting = [
                asyncio.create_task(stack.enter_context(budget.reservation()).reserve(size)) for size in (41, 30, 20)
            ]
            await settle()
            assert not any(task.done() for task in waiting)
            waiting[0].cancel()
            await waiting[1]  # 60 + 30, and 5 for the one after it
            await settle()
            assert not waiting[2].done()
            waiting[2].cancel()

    asyncio.run(main())


def test_a_body_that_leaves_no_room_for_its_copies_is_received_alone() -> None:
    async def main() -> None:
        budget = ByteBudget(100, copies=2)
        with budget.reservation() as reservation:
            await reservation.reserve(90)
        with budget.reservation() as reservation:
            await reservation.reserve(10)
            assert budget.used == 10

    asyncio.run(main())


@settings(max_examples=60)
@given(
    bodies=st.lists(
        st.tuples(st.lists(st.integers(0, 60), min_size=1, max_size=5), st.booleans()), min_size=1, max_size=20
    )
)
def test_every_body_is_received_and_stated_lengths_keep_the_limit(bodies: list[tuple[list[int], bool]]) -> None:
    async def main() -> None:
        budget, whole = ByteBudget(100), all(len(chunks) == 1 for chunks, _ in bodies)
        largest = max(sum(chunks) for chunks, _ in bodies)

        async def receive(chunks: list[int]) -> None:
            with budget.reservation() as reservation:
                for size in chunks:
                    await reservation.reserve(size)
                    assert budget.used <= 100 + (0 if whole else largest)
                    await asyncio.sleep(0)

        tasks = [(asyncio.create_task(receive(chunks)), cancelled) for chunks, cancelled in bodies]
        await asyncio.sleep(0)
        for task, cancelled in tasks:
            if cancelled:
                task.cancel()
        await asyncio.wait_for(asyncio.gather(*(task for task, _ in tasks), return_exceptions=True), 10)
        assert all(task.cancelled() or not task.exception() for task, _ in tasks)
        assert (budget.used, budget.waiting) == (0, 0)

    asyncio.run(main())

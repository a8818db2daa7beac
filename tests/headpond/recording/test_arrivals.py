import asyncio

import pytest

from headpond.errors import Busy
from headpond.recording.arrivals import MAX_QUEUED, Arrivals


def test_chats_that_wait_get_their_places_in_the_order_of_their_calls() -> None:
    async def main() -> None:
        arrivals, order = Arrivals(concurrency=1, queue=True), list[int]()

        async def chat(number: int) -> None:
            await arrivals.wait()
            with arrivals.claim():
                order.append(number)
                await asyncio.sleep(0)

        await asyncio.gather(*(chat(number) for number in range(8)))
        assert order == [*range(8)]

    asyncio.run(main())


def test_the_end_of_a_session_wakes_all_chats_that_wait_although_one_is_in_flight() -> None:
    async def main() -> None:
        arrivals = Arrivals(concurrency=1, queue=True)
        with arrivals.claim():
            waiting = [asyncio.create_task(arrivals.wait()) for _ in range(3)]
            await asyncio.sleep(0)
            arrivals.end()
            await asyncio.gather(*waiting)

    asyncio.run(main())


def test_the_chats_that_wait_are_bounded() -> None:
    async def main() -> None:
        arrivals = Arrivals(concurrency=1, queue=True)
        with arrivals.claim():
            waiting = [asyncio.create_task(arrivals.wait()) for _ in range(MAX_QUEUED)]
            await asyncio.sleep(0)
            with pytest.raises(Busy, match=f"{MAX_QUEUED} chats wait"):
                await arrivals.wait()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(main())

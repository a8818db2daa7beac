import asyncio

from headpond.orchestrator.duties.slices import AT_ONCE, in_slices


def test_other_tasks_run_between_two_slices() -> None:
    async def main() -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        waiting = asyncio.create_task(other())
        slices: list[tuple[list[int], int]] = [(list(some), turns) async for some in in_slices(range(2 * AT_ONCE + 1))]
        waiting.cancel()
        assert [len(some) for some, _ in slices] == [AT_ONCE, AT_ONCE, 1]
        assert [item for some, _ in slices for item in some] == list(range(2 * AT_ONCE + 1))
        assert [turn for _, turn in slices] == [1, 2, 3]

    asyncio.run(main())

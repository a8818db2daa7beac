"""When an update that failed is tried again."""

import asyncio

from support.waiting import HANG_S

from headpond.engines.replicas.selection import Replica
from headpond.orchestrator.serving.weight_updates import CHECK_S, pause_or_return


def test_a_replica_that_answers_again_is_updated_at_once() -> None:
    async def main() -> bool:
        replica = Replica(url="http://127.0.0.1:1")
        replica.failed_polls = 3
        waiting = asyncio.create_task(pause_or_return(replica, 10 * HANG_S))
        await asyncio.sleep(3 * CHECK_S)
        waited = not waiting.done()
        replica.failed_polls = 0
        await asyncio.wait_for(waiting, HANG_S)
        return waited

    assert asyncio.run(main()), "it is away"

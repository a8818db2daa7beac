import asyncio
from pathlib import Path
from typing import Any

import redis.asyncio

from penstock import redis_keys
from penstock.runtime.embedded_redis import EmbeddedRedis
from tasks.execution import write_lease
from tasks.outbox import PIPELINE_WRITES, Outbox


def test_concurrent_writes_share_a_round_trip_and_their_keys_expire(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        commands, leases, ttl_s = asyncio.run(write_at_once(server.url, PIPELINE_WRITES))
    assert commands["cmdstat_exec"]["calls"] == 1
    assert commands["cmdstat_expire"]["calls"] == 1
    assert leases == PIPELINE_WRITES
    assert 0 < ttl_s <= redis_keys.LEASES_TTL_S


async def write_at_once(url: str, count: int) -> tuple[dict[str, Any], int, int]:
    async with redis.asyncio.Redis.from_url(url) as client:
        outbox = Outbox(client)
        running = asyncio.create_task(outbox.run())
        await asyncio.gather(
            *(
                outbox.write(lambda pipe, number=number: write_lease(pipe, f"lease{number}", "w:1"))
                for number in range(count)
            )
        )
        running.cancel()
        return (
            await client.info("commandstats"),
            await client.hlen(redis_keys.LEASES),
            await client.ttl(redis_keys.LEASES),
        )

"""Writes to Redis for many executions of an asyncio worker, over one connection.

A write is repeated until it succeeds: leases and replies are safe to repeat. The number of waiting writes is bounded by
the executions that wait for them, at most `-c`.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

logger = logging.getLogger("penstock.outbox")

Expiry = tuple[str, int]
"""A written key and its time to live in seconds."""
Write = Callable[[Any], Expiry]
"""Adds its commands to a pipeline."""
TIMEOUT_S = 5.0  # Redis responds within milliseconds; a longer silence is a dead connection
RETRY_FIRST_S, RETRY_MOST_S = 0.1, 2.0
PIPELINE_WRITES = 48  # keeps the CPU time of one round trip on the loop under a millisecond
GATHER_S = 0.01  # between two pipelines: a single write is sent at once, many concurrent ones share pipelines


class Outbox:
    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._waiting: list[tuple[Write, asyncio.Future[None]]] = []
        self._filled = asyncio.Event()

    async def write(self, write: Write) -> None:
        """Put `write` into the next pipeline and wait until Redis has executed it."""
        written = asyncio.get_running_loop().create_future()
        self._waiting.append((write, written))
        self._filled.set()
        await written

    async def run(self) -> None:
        while True:
            await self._filled.wait()
            batch, self._waiting = self._waiting[:PIPELINE_WRITES], self._waiting[PIPELINE_WRITES:]
            if not self._waiting:
                self._filled.clear()
            await self._send(batch)
            await asyncio.sleep(GATHER_S)

    async def _send(self, batch: list[tuple[Write, asyncio.Future[None]]]) -> None:
        pause_s = RETRY_FIRST_S
        while True:
            try:
                async with asyncio.timeout(TIMEOUT_S), self._client.pipeline(transaction=True) as pipe:
                    expiries = {write(pipe) for write, _ in batch}
                    for key, ttl_s in expiries:
                        pipe.expire(key, ttl_s)
                    await pipe.execute()
                break
            except (RedisError, OSError) as error:
                logger.warning(
                    "action=redis_write_waits writes=%d again_in_s=%.1f error=%s", len(batch), pause_s, error
                )
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MOST_S)
        for _, written in batch:
            if not written.done():
                written.set_result(None)

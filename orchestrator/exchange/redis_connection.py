"""The orchestrator's connection to Redis: every command is retried until it succeeds, and outages are reported.

Commands must be idempotent: after a broken connection it is unknown whether the first attempt took effect.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from headpond.config.redis_address import address, explain, reason
from headpond.errors import ConfigError
from headpond.orchestrator.duties.housekeeping import Troubles

logger = logging.getLogger("headpond.broker")

T = TypeVar("T")
RESPONSE_S = 5.0  # above the longest XREAD block
RETRY_FIRST_S, RETRY_MOST_S = 0.1, 2.0
LOG_EVERY_S = 10.0  # during an outage


class Broker:
    def __init__(self, url: str, troubles: Troubles | None = None) -> None:
        self._url = url
        # No retries in the client: they hide outages, and repeat a refused password for seconds.
        self.client = redis.asyncio.Redis.from_url(
            url, socket_timeout=None, socket_connect_timeout=5, retry=Retry(NoBackoff(), retries=0)
        )
        self.trouble = (troubles or Troubles()).entry()
        self.outages = 0
        self._down_since = self._logged_at = 0.0

    async def call(self, command: Callable[[redis.asyncio.Redis], Awaitable[T]]) -> T:
        """The result of `command`, retried as long as Redis is unavailable."""
        pause_s = RETRY_FIRST_S
        while True:
            try:
                # Not the client's time-out, which swallows cancellations on Python 3.11.
                async with asyncio.timeout(RESPONSE_S):
                    result = await command(self.client)
            except (RedisError, OSError) as error:
                self._down(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MOST_S)
            else:
                if self.trouble.text is not None:
                    logger.info("action=redis_back at=%s", address(self._url))
                self.trouble.text = None
                return result

    async def connect(self, *, patience_s: float) -> None:
        """Raises ConfigError after `patience_s`, or at once if Redis refuses: the address or the password is wrong."""
        give_up_at = time.monotonic() + patience_s
        while True:
            try:
                async with asyncio.timeout(RESPONSE_S):
                    await self.client.ping()
                return
            except (RedisError, OSError) as error:
                # A refusal is final; for any other error the server may still be starting.
                refused = isinstance(error, AuthenticationError | ResponseError)
                if refused or time.monotonic() > give_up_at:
                    raise ConfigError(explain(self._url, error)) from error
                logger.warning("action=redis_awaited at=%s error=%s", address(self._url), reason(error))
                await asyncio.sleep(min(RETRY_MOST_S, patience_s / 10))

    async def close(self) -> None:
        await self.client.aclose()

    def _down(self, error: Exception) -> None:
        """Called for every failed command; logs when an outage begins, then every LOG_EVERY_S."""
        now = time.monotonic()
        if self.trouble.text is None:
            self.outages += 1
            self._down_since, self._logged_at = now, -LOG_EVERY_S
        self.trouble.text = (
            f"Redis at {address(self._url)} does not answer ({reason(error)}); the run waits and nothing is lost"
        )
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            logger.warning("action=redis_away for_s=%.0f %s", now - self._down_since, self.trouble.text)

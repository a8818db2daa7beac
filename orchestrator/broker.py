"""The orchestrator's line to Redis: every question is asked until it is answered, and an outage says so.

What is asked must be safe to ask twice: after a broken connection nobody knows whether the first time counted.
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

from penstock.config.redis_address import address, has_password
from penstock.errors import ConfigError

logger = logging.getLogger("penstock.broker")

T = TypeVar("T")
ANSWER_S = 5.0  # above the longest XREAD block
RETRY_FIRST_S, RETRY_MOST_S = 0.1, 2.0
REMIND_S = 10.0


class Broker:
    def __init__(self, url: str) -> None:
        self._url = url
        # The retrying is ours: the client's own hides outages, and repeats a refused password for seconds.
        self.client = redis.asyncio.Redis.from_url(
            url, socket_timeout=None, socket_connect_timeout=5, retry=Retry(NoBackoff(), retries=0)
        )
        self.trouble: str | None = None
        """why Redis is not answering just now"""
        self.outages = 0
        self._down_since = self._said_at = 0.0

    async def ask(self, question: Callable[[redis.asyncio.Redis], Awaitable[T]]) -> T:
        """The answer, however long Redis is away."""
        pause_s = RETRY_FIRST_S
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):  # the client's own time-out swallows cancellations on Python 3.11
                    answer = await question(self.client)
            except (RedisError, OSError) as error:
                self._down(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MOST_S)
            else:
                self._up()
                return answer

    async def start(self, *, patience_s: float) -> None:
        """A first contact that does not come about is the user's to mend: wrong address, wrong password."""
        give_up_at = time.monotonic() + patience_s
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self.client.ping()
                return
            except (RedisError, OSError) as error:
                # An answer that is no welcome stays the same; anything else may be a server that is still starting.
                refused = isinstance(error, AuthenticationError | ResponseError)
                if refused or time.monotonic() > give_up_at:
                    raise ConfigError(unusable(self._url, error)) from error
                logger.warning("action=redis_awaited at=%s error=%s", address(self._url), _said(error))
                await asyncio.sleep(min(RETRY_MOST_S, patience_s / 10))

    async def close(self) -> None:
        await self.client.aclose()

    def _down(self, error: Exception) -> None:
        """Every question that fails comes here; the log hears of it when an outage begins, and then now and again."""
        now = time.monotonic()
        if self.trouble is None:
            self.outages += 1
            self._down_since, self._said_at = now, -REMIND_S
        self.trouble = (
            f"Redis at {address(self._url)} does not answer ({_said(error)}); waiting for it, nothing is lost"
        )
        if now - self._said_at >= REMIND_S:
            self._said_at = now
            logger.warning("action=redis_away for_s=%.0f %s", now - self._down_since, self.trouble)

    def _up(self) -> None:
        if self.trouble is not None:
            logger.info("action=redis_back at=%s", address(self._url))
        self.trouble = None


def unusable(url: str, error: Exception) -> str:
    """Why the Redis at `url` is of no use, and what to do about it."""
    if isinstance(error, AuthenticationError):
        does = "refuses the password" if has_password(url) else "asks for a password"
        return (
            f"Redis at {address(url)} {does}: put the right one into the environment, "
            "PENSTOCK_REDIS_URL=redis://:PASSWORD@HOST:PORT/NUMBER"
        )
    return (
        f"Redis at {address(url)} cannot be used ({_said(error)}): "
        "start it, or set redis_url (PENSTOCK_REDIS_URL) to the right one"
    )


def _said(error: Exception) -> str:
    return str(error) or "it takes too long"  # a time-out has no words of its own

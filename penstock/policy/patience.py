"""How often and how long one request is tried again, and which failure it is in the end."""

import asyncio
import random
import time

from penstock.errors import EngineUnreachable, InfrastructureFailure
from penstock.rollout_config import Engine


class Patience:
    """Being away and failing are counted apart: an engine that restarts is waited for, one that answers with errors is
    not asked for ever."""

    def __init__(self, settings: Engine) -> None:
        self._settings = settings
        self.tries = 0
        """that came to nothing, of both kinds"""
        self.failures = 0
        self._pause_s = settings.retry_first_s
        self._away_since: float | None = None

    def failed(self, error: Exception) -> None:
        """A replica was there, but gave no good answer."""
        self.tries += 1
        self._away_since = None
        self.failures += 1
        if self.failures > self._settings.retries:
            raise InfrastructureFailure(
                f"the engine failed {self.failures} times at one request, the last time: {_text(error)}"
            ) from error

    def away(self, error: Exception) -> None:
        """A replica could not be connected to."""
        self.tries += 1
        now = time.monotonic()
        self._away_since = self._away_since or now
        if now - self._away_since >= self._settings.unreachable_s:
            raise EngineUnreachable(
                f"no replica of the engine could be connected to for {self._settings.unreachable_s:g} s, the last "
                f"time: {_text(error)}; is it running, and is engine.urls right?"
            ) from error

    async def pause(self) -> None:
        await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))  # noqa: S311  so that many do not come at once
        self._pause_s = min(2 * self._pause_s, self._settings.retry_most_s)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

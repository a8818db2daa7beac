"""The requests of one session that wait for the engine. Sealing or closing the session ends them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable


class InFlight:
    def __init__(self) -> None:
        self._scopes: set[asyncio.Timeout] = set()
        self._ended: asyncio.Event | None = None  # made when it is awaited: it takes a kilobyte

    @contextlib.asynccontextmanager
    async def request(self, gone: Callable[[], Exception]) -> AsyncIterator[None]:
        """Raises `gone()` if the session ends first: what the block awaits is then cancelled, the engine's request
        included. A turn that is being recorded is recorded completely."""
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.add(scope)
                yield
        except TimeoutError:
            if scope.expired():
                raise gone() from None
            raise
        finally:
            self._scopes.discard(scope)
            if self._ended:
                self._ended.set()

    async def end(self) -> None:
        """Returns when none is left. Nothing is awaited after that, so that the caller can keep it so."""
        while self._scopes:
            self._ended = self._ended or asyncio.Event()
            self._ended.clear()
            for scope in self._scopes:
                if not scope.expired():
                    scope.reschedule(asyncio.get_running_loop().time())
            await self._ended.wait()

"""The one HTTP client of a process: retries with jitter, failures in two kinds. How bytes come: `transport.py`."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

import aiohttp

from penstock.config.engine import Engine
from penstock.engines.replicas import Replica
from penstock.engines.transport import ON_LOOP_BYTES, EngineConnection, raise_if_out_of_descriptors, receive, sendable
from penstock.errors import EngineUnreachable, InfrastructureFailure, PolicyFailure, Upstream
from penstock.runtime.offload import in_cpu_thread


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


T = TypeVar("T")

# Of an error's text: enough to see what it is about.
ERROR_BYTES = 4096
TRANSIENT = frozenset({408, 425, 429})
# How vLLM, SGLang and OpenAI say it.
CONTEXT_LIMIT = ("context length", "context_length", "maximum model length")


@dataclass(frozen=True, kw_only=True)
class Request:
    path: str
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Answer(Generic[T]):
    value: T
    replica: Replica
    version_sent: int
    """of the replica's weights when the request left"""
    version_received: int
    failures: int
    """of the attempts before this one"""


class EngineClient(EngineConnection):
    """One a process."""

    async def ask(self, request: Request, read: Callable[[bytes], T], *, home: Replica | None = None) -> Answer[T]:
        """What `read` makes of the answer. An answer that it finds malformed (`Upstream`) is asked for again, like one
        that failed. `home` is the replica to prefer."""
        patience, failed = Patience(self.settings), None
        while True:
            replica = self.replicas.choose(home, failed=failed)
            sent = replica.version
            try:
                value = await self._once(replica, request, read, tries=patience.tries)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                raise_if_out_of_descriptors(error)
                replica.mark_away()
                patience.away(error)
                if not self.replicas.all_avoided:
                    continue
            except (aiohttp.ClientError, Upstream) as error:
                failed = replica
                patience.failed(error)
            else:
                return Answer(
                    value=value,
                    replica=replica,
                    version_sent=sent,
                    version_received=replica.version,
                    failures=patience.failures,
                )
            await patience.pause()

    async def _once(self, replica: Replica, request: Request, read: Callable[[bytes], T], *, tries: int) -> T:
        url, data = replica.url + request.path, sendable(request.body)
        headers = {**request.headers, "X-Retry-Count": str(tries)}
        with replica.busy(), self.budget.share() as share:
            async with self._http.post(url, data=data, headers=headers, allow_redirects=False) as response:
                if response.status != 200:
                    _refuse(url, response.status, await response.content.read(ERROR_BYTES))
                chunks = await receive(response, share, self.budget)
            if share.held <= ON_LOOP_BYTES:
                return read(b"".join(chunks))
            return await in_cpu_thread(_read_chunks, chunks, read)


def _read_chunks(chunks: list[bytes], read: Callable[[bytes], T]) -> T:
    body = b"".join(chunks)
    chunks.clear()
    return read(body)


def _refuse(url: str, status: int, content: bytes) -> NoReturn:
    text = " ".join(content.decode(errors="replace").split())
    said = f"{url} answered {status}: {text[:300]}"
    if status >= 500 or status in TRANSIENT:
        raise Upstream(said)
    if any(words in text.lower() for words in CONTEXT_LIMIT):
        raise PolicyFailure(f"context limit: {said}")
    raise InfrastructureFailure(f"{said}; check engine.urls, engine.model and engine.dialect")

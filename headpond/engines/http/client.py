"""The engine client of a process: sends requests, retries with jitter, classifies the final failure.

Connections and the byte budget are in `transport.py`.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

import aiohttp

from headpond.config.engine import Engine
from headpond.engines.dialects.base import Dialect
from headpond.engines.http.transport import (
    ON_LOOP_BYTES,
    RETRY_HEADER,
    EngineConnection,
    head_of,
    joined,
    limited,
    raise_if_out_of_descriptors,
    receive,
    sendable,
)
from headpond.engines.replicas.control import read_page
from headpond.engines.replicas.selection import Replica
from headpond.errors import Aborted, EngineUnreachable, InfrastructureFailure, PolicyFailure, Upstream, text_of
from headpond.event_loop.offload import in_cpu_thread
from headpond.replica_use import Usage
from headpond.turn import Body, SaidVersion

T = TypeVar("T")

# Bytes of an error response that are read: enough for its message.
ERROR_BYTES = 4096
TRANSIENT = frozenset({408, 425, 429})


@dataclass(frozen=True, kw_only=True)
class Request:
    dialect: Dialect
    body: bytes
    headers: Mapping[str, str]
    # Version of the adapter that the request names. The response has no other.
    version: SaidVersion | None = None


@dataclass(frozen=True, kw_only=True)
class Response(Generic[T]):
    value: T  # The result of `read`.
    replica: Replica
    version: SaidVersion  # Version of the replica's weights before the request left.
    answered_at: float | None  # `TurnMetadata.answered_at`.
    seconds: float  # Time that the replica took to answer.
    failures: int  # Failed attempts before this one.
    aborts: int  # How many of `failures` were aborts.


class EngineClient(EngineConnection):
    """Sends requests to the engine's replicas. One per process."""

    async def send(
        self,
        request: Request,
        read: Callable[[Body], T],
        *,
        preferred: Replica | None = None,
        usage: Usage | None = None,
    ) -> Response[T]:
        """Send a request and pass the body of the response to `read` (`read_turn` for a recorded
        chat).

        A response that `read` rejects with `Upstream` is retried like a failed request. `preferred`
        is that of `Replicas.choose`. `usage` counts the cost of failed attempts.
        """
        retries, failed = Retries(self.settings), None
        while True:
            replica = self.replicas.choose(preferred, failed=failed)
            try:
                with replica.busy():  # requests that wait for a poll count for the next choice
                    answer = await self.replicas.ask(replica)
                    started = time.monotonic()
                    with answer.sending():
                        value = await self._send_once(replica, request, read, attempts=retries.attempts)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                raise_if_out_of_descriptors(error)
                replica.mark_unreachable()
                retries.count_unreachable(error)
                if not self.replicas.all_avoided:
                    continue
            except EngineUnreachable as error:
                retries.count_unreachable(error)
                if not self.replicas.all_refused:
                    continue
            except (aiohttp.ClientError, Upstream) as error:
                failed = replica
                if isinstance(error, aiohttp.ClientError):  # the connection broke: it may be restarting
                    replica.doubt()
                if usage and isinstance(error, Aborted):
                    usage.lost(replica.url, error.sampled_tokens)
                retries.count_failure(error)
            else:
                return Response(
                    value=value,
                    replica=replica,
                    version=request.version or answer.version,
                    answered_at=None if request.version else self.replicas.answered_at(),
                    seconds=time.monotonic() - started,
                    failures=retries.failures,
                    aborts=retries.aborts,
                )
            await retries.pause()

    async def _send_once(self, replica: Replica, request: Request, read: Callable[[Body], T], *, attempts: int) -> T:
        name = self._names.next()
        url, data = replica.url + request.dialect.endpoint, sendable(request.dialect.named(request.body, name))
        headers = self._named(replica, {**request.headers, RETRY_HEADER: str(attempts)}, name)
        with self.budget.reservation() as reservation:
            async with (
                limited(self.settings),
                self._http.post(url, data=data, headers=headers, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    content = await read_page(response, ERROR_BYTES)
                    _raise_status(url, response.status, content, request.dialect)
                chunks = await receive(response, reservation, self.budget)
            head = head_of(chunks)
            if reservation.held <= ON_LOOP_BYTES:
                value = read(joined(chunks))
            else:
                value = await in_cpu_thread(_read_chunks, chunks, read)
            self._names.check(replica, name, head)
            return value


class Retries:
    """Retry policy of one request: attempts, delays, and the class of the final failure.

    Failed connections and failed responses are counted separately. A restarting engine is waited
    for up to `unreachable_s`. An engine that responds with errors is retried `retries` times.
    """

    def __init__(self, settings: Engine) -> None:
        self._settings = settings
        self.attempts = 0  # Unsuccessful attempts of both kinds.
        self.failures = self.aborts = 0
        self._pause_s = settings.retry_first_s
        self._unreachable_since: float | None = None

    def count_failure(self, error: Exception) -> None:
        """Count a response that was not valid, although the replica was reached."""
        self.attempts += 1
        self._unreachable_since = None
        self.failures += 1
        self.aborts += isinstance(error, Aborted)
        if self.failures > self._settings.retries:
            raise InfrastructureFailure(
                f"the engine failed {self.failures} times at one request, the last time: {text_of(error)}"
            ) from error

    def count_unreachable(self, error: Exception) -> None:
        """Count a replica that could not be connected to, or may not serve."""
        self.attempts += 1
        failed_at = time.monotonic()
        self._unreachable_since = self._unreachable_since or failed_at
        if failed_at - self._unreachable_since >= self._settings.unreachable_s:
            if isinstance(error, EngineUnreachable):
                waited_s = self._settings.unreachable_s
                raise EngineUnreachable(f"no replica may serve for {waited_s:g} s, the last asked: {error}") from error
            raise EngineUnreachable(
                f"no replica of the engine could be connected to for {self._settings.unreachable_s:g} s, the last "
                f"time: {text_of(error)}; is it running, and is engine.urls right?"
            ) from error

    async def pause(self) -> None:
        await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))  # noqa: S311  spreads retries of many requests
        self._pause_s = min(2 * self._pause_s, self._settings.retry_most_s)


def _read_chunks(chunks: list[Body], read: Callable[[Body], T]) -> T:
    """A function of its own: `bench turn` times it."""
    return read(joined(chunks))


def _raise_status(url: str, status: int, content: bytes, dialect: Dialect) -> NoReturn:
    text = " ".join(content.decode(errors="replace").split())
    message = f"{url} answered {status}: {text[:300]}"
    if status >= 500 or status in TRANSIENT:
        raise Upstream(message)
    if dialect.is_context_limit(text):
        raise PolicyFailure(f"context limit: {message}")
    absent = f"; {dialect.absent_hint}" if status == 404 and dialect.absent_hint else ""
    raise InfrastructureFailure(f"{message}; check engine.urls, engine.model and engine.dialect{absent}")

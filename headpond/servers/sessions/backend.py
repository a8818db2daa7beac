"""Requests to the engine behind the sessions, each to the session's replica if that may serve.

A request that no replica took waits for one, up to `sessions.engine_wait_s`. One that breaks off or exceeds the byte
budget raises `Upstream` (502): retries are the client's decision.
"""

import asyncio
import contextlib
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import aiohttp
from yarl import URL

from headpond.engines.dialects.base import Dialect
from headpond.engines.http.transport import (
    NAME_HEADER,
    UNREACHABLE,
    EngineConnection,
    Reservation,
    do_not_reuse,
    head_of,
    joined,
    limited,
    raise_if_out_of_descriptors,
    receive,
    sendable,
)
from headpond.engines.replicas.selection import Asked, Replica
from headpond.errors import EngineUnreachable, InfrastructureFailure, Upstream
from headpond.turn import Body, SaidVersion

logger = logging.getLogger("headpond.sessions")

FIRST_PAUSE_S, MOST_PAUSE_S = 0.1, 2.0
OK = 200
# An engine answers with this status while it is paused or starts.
UNAVAILABLE = 503
# Statuses that are passed on. 101 would hand the client's connection over to the engine.
RELAYED = range(200, 600)


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    method: str
    target: str  # path and query, already percent-encoded
    body: bytes
    headers: Mapping[str, str]
    # dialect of a chat, whose response names it; None for a request that is passed on
    dialect: Dialect | None = None
    # version of the adapter that the request names; the response cannot have another one
    version: SaidVersion | None = None


@dataclass(frozen=True, kw_only=True)
class EngineResponse:
    status: int
    headers: Mapping[str, str]
    chunks: list[Body]  # the body as received; `joined` empties the list
    name: str | None  # name of its request, which the response must repeat (`Backend.check_name`)
    head: bytes
    replica: Replica
    version: SaidVersion  # version of the replica's weights before the request left
    answered_at: float | None  # `TurnMetadata.answered_at`
    seconds: float  # time that the replica took to answer

    def joined(self) -> Body:
        return joined(self.chunks)


class NotTaken(Upstream):
    """No replica has begun to answer: the request can be sent again."""


class Backend(EngineConnection):
    wait_s = 0.0  # `sessions.engine_wait_s`

    @contextlib.asynccontextmanager
    async def send(self, request: EngineRequest, *, preferred: Replica | None = None) -> AsyncIterator[EngineResponse]:
        """The response, whatever its status. Its bytes are reserved in the budget until the block ends."""
        deadline, pause_s, failed = time.monotonic() + self.wait_s, FIRST_PAUSE_S, None
        while True:
            replica = self.replicas.choose(preferred, failed=failed)
            try:
                with self.budget.reservation() as reservation:
                    response = await self._attempt(replica, request, reservation)
                    if response.status != UNAVAILABLE or time.monotonic() >= deadline:
                        yield response
                        return
            except NotTaken as error:
                if time.monotonic() >= deadline:
                    waited = f", after {self.wait_s:g} s (sessions.engine_wait_s)" if self.wait_s else ""
                    raise Upstream(f"{error}{waited}") from error
            failed = replica
            spread_s = pause_s * random.uniform(0.5, 1.0)  # noqa: S311  of many requests that wait
            await asyncio.sleep(min(spread_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(2 * pause_s, MOST_PAUSE_S)

    async def _attempt(self, replica: Replica, request: EngineRequest, reservation: Reservation) -> EngineResponse:
        try:
            with replica.busy():
                asked = await self.replicas.ask(replica)
                with asked.sending():
                    response = await self._exchange(replica, request, reservation, asked)
                    if response.status != OK and response.name and replica.names_requests and not _is_named(response):
                        # Errors have no name: on a connection that was used before, this may be another request's.
                        return await self._exchange(replica, request, reservation, asked, alone=True)
                    return response
        except EngineUnreachable as error:
            raise NotTaken(f"{UNREACHABLE}: {error}") from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            replica.mark_unreachable()
            raise NotTaken(f"{UNREACHABLE}: {_describe(error)}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            replica.doubt()
            raise Upstream(f"the engine broke off its response: {_describe(error)}") from error
        except InfrastructureFailure as error:
            raise Upstream(str(error)) from error

    def check_name(self, response: EngineResponse) -> None:
        """`Upstream` if it answers another request."""
        if response.name:
            self._names.check(response.replica, response.name, response.head)

    async def _exchange(
        self,
        replica: Replica,
        request: EngineRequest,
        reservation: Reservation,
        asked: Asked,
        *,
        alone: bool = False,
    ) -> EngineResponse:
        """`alone`: on a connection of its own."""
        started = time.monotonic()
        url, body, name = URL(replica.url + request.target, encoded=True), request.body, None
        if request.dialect:
            name = self._names.next()
            body = request.dialect.named(body, name)
        headers = self._named(replica, request.headers, name, alone=alone)
        try:
            async with (
                limited(self.settings),
                self._http.request(
                    request.method, url, data=sendable(body), headers=headers, allow_redirects=False
                ) as response,
            ):
                if response.status != OK:
                    do_not_reuse(response.connection)
                if response.status not in RELAYED:
                    raise Upstream(f"the engine answered with status {response.status}, which is none of a response")
                chunks = await receive(response, reservation, self.budget)
        except aiohttp.ClientConnectorError as error:
            raise_if_out_of_descriptors(error)
            raise
        return EngineResponse(
            status=response.status,
            headers=response.headers,
            chunks=chunks,
            name=name,
            head=head_of(chunks),
            replica=replica,
            version=request.version or asked.version,
            answered_at=None if request.version else self.replicas.answered_at(),
            seconds=time.monotonic() - started,
        )


def _is_named(response: EngineResponse) -> bool:
    """Servers may repeat the header in errors, too (vLLM: `--enable-request-id-headers`)."""
    return response.headers.get(NAME_HEADER) == response.name


def _describe(error: Exception) -> str:
    """aiohttp's texts name the engine's address, which is not for agents."""
    logger.warning("action=engine_failed error=%r", error)
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else type(error).__name__

"""Requests to the engine behind the sessions. Each is sent once, to the session's replica if that is reachable.

An engine that is unreachable, breaks off or exceeds the byte budget raises `Upstream` (502): retries are the client's
decision.
"""

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import aiohttp
from yarl import URL

from penstock.engines.replicas import Replica
from penstock.engines.transport import (
    UNREACHABLE,
    EngineConnection,
    Reservation,
    raise_if_out_of_descriptors,
    receive,
    sendable,
)
from penstock.errors import InfrastructureFailure, Upstream
from penstock.turn import SaidVersion


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    method: str
    target: str
    """path and query, already percent-encoded"""
    body: bytes
    headers: Mapping[str, str]
    version: SaidVersion | None = None
    """of the adapter that the request names: the response cannot be of another one"""


@dataclass(frozen=True, kw_only=True)
class EngineResponse:
    status: int
    headers: Mapping[str, str]
    chunks: list[bytes]
    """the body as received; `joined` empties the list"""
    replica: Replica
    version: SaidVersion
    """of the replica's weights before the request left"""
    answered_at: float | None
    """for `TurnMetadata`"""

    def joined(self) -> bytes:
        body = b"".join(self.chunks)
        self.chunks.clear()
        return body


class Backend(EngineConnection):
    @contextlib.asynccontextmanager
    async def send(self, request: EngineRequest, *, preferred: Replica | None = None) -> AsyncIterator[EngineResponse]:
        """The response, whatever its status. Its bytes are reserved in the budget until the block ends."""
        replica = self.replicas.choose(preferred)
        with self.budget.reservation() as reservation:
            try:
                with replica.busy():
                    response = await self._receive(replica, request, reservation)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                replica.mark_unreachable()
                raise Upstream(f"{UNREACHABLE}: {_describe(error)}") from error
            except (aiohttp.ClientError, TimeoutError) as error:
                replica.doubt()
                raise Upstream(f"the engine broke off its response: {_describe(error)}") from error
            except InfrastructureFailure as error:
                raise Upstream(str(error)) from error
            yield response

    async def _receive(self, replica: Replica, request: EngineRequest, reservation: Reservation) -> EngineResponse:
        version = await self.replicas.before(replica)
        if refusal := self.replicas.refusal(replica):
            raise Upstream(f"{UNREACHABLE}: {refusal}")
        url = URL(replica.url + request.target, encoded=True)
        try:
            async with self._http.request(
                request.method, url, data=sendable(request.body), headers=request.headers, allow_redirects=False
            ) as response:
                chunks = await receive(response, reservation, self.budget)
        except aiohttp.ClientConnectorError as error:
            raise_if_out_of_descriptors(error)
            raise
        return EngineResponse(
            status=response.status,
            headers=response.headers,
            chunks=chunks,
            replica=replica,
            version=request.version or version,
            answered_at=None if request.version else self.replicas.answered_at(),
        )


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__

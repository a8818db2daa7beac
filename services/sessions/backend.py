"""The engine behind the sessions: each request is sent once, to the session's replica where it can be reached.

An engine that cannot be reached, breaks off or says more than fits is `Upstream` (502): whether to try again is for the
client to decide, whose turn it is.
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


@dataclass(frozen=True, kw_only=True)
class Asked:
    method: str
    target: str
    """path and query, as they are sent"""
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Answered:
    status: int
    headers: Mapping[str, str]
    chunks: list[bytes]
    """the body as it came; whoever joins them empties the list"""
    size: int
    replica: Replica
    version_sent: int
    """of the replica's weights when the request left"""

    def joined(self) -> bytes:
        body = b"".join(self.chunks)
        self.chunks.clear()
        return body


class Backend(EngineConnection):
    @contextlib.asynccontextmanager
    async def ask(self, asked: Asked, *, home: Replica | None = None) -> AsyncIterator[Answered]:
        """What was answered, whatever its status. Until the end of the block, its bytes count as being received."""
        replica = self.replicas.choose(home)
        with self.budget.reservation() as reservation:
            try:
                with replica.busy():
                    answered = await self._receive(replica, asked, reservation)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                replica.mark_unreachable()
                raise Upstream(f"{UNREACHABLE}: {_said(error)}") from error
            except (aiohttp.ClientError, TimeoutError) as error:
                raise Upstream(f"the engine broke off its answer: {_said(error)}") from error
            except InfrastructureFailure as error:
                raise Upstream(str(error)) from error
            yield answered

    async def _receive(self, replica: Replica, asked: Asked, reservation: Reservation) -> Answered:
        version = replica.version
        url = URL(replica.url + asked.target, encoded=True)
        try:
            async with self._http.request(
                asked.method, url, data=sendable(asked.body), headers=asked.headers, allow_redirects=False
            ) as response:
                chunks = await receive(response, reservation, self.budget)
        except aiohttp.ClientConnectorError as error:
            raise_if_out_of_descriptors(error)
            raise
        return Answered(
            status=response.status,
            headers=response.headers,
            chunks=chunks,
            size=sum(map(len, chunks)),
            replica=replica,
            version_sent=version,
        )


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__

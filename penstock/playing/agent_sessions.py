"""Sessions of a session server for agents that only know a URL: made for a rollout, sealed, and deleted on every path.

The servers are equal: each rollout keeps to the one that made its session.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec
import orjson

from penstock.config.sessions import Sessions
from penstock.engines.replicas import Replica, Replicas
from penstock.errors import EngineUnreachable, InfrastructureFailure, NothingToTrain
from penstock.recording import Sealed
from penstock.runtime.cancellation import run_to_completion

logger = logging.getLogger("penstock.playing")

SEALED = msgspec.json.Decoder(Sealed)
CONNECT_S = 5.0
CREATE_S = 30.0  # a few files are made; a server that is drained of threads may take seconds
SEAL_S = 300.0  # of a rollout with gigabytes of routed rows, on a slow disk
SEAL_TRIES, SEAL_PAUSE_S = 3, 0.5
DELETE_S = 10.0
ERROR_CHARACTERS = 2_000


class AgentSession:
    """What one agent talks to."""

    def __init__(self, http: aiohttp.ClientSession, base_url: str, secret: str) -> None:
        self.base_url = base_url
        self.secret = secret
        self._http = http
        self._url = base_url.removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {secret}"}

    async def seal(self, error: str) -> Sealed:
        """What was recorded; NothingToTrain where the agent asked for nothing."""
        body = orjson.dumps({"error": error[:ERROR_CHARACTERS]})
        for tries in range(1, SEAL_TRIES + 1):
            try:
                status, said = await self._post("/seal", body)
            except (aiohttp.ClientError, TimeoutError) as failure:
                if tries == SEAL_TRIES:
                    raise InfrastructureFailure(f"the session server did not seal: {failure!r}") from failure
                await asyncio.sleep(SEAL_PAUSE_S)
                continue
            if status == NothingToTrain.status_code:
                raise NothingToTrain(_error(said))
            if status != 200:
                raise InfrastructureFailure(f"the session server did not seal: {status}, {_error(said)}")
            return SEALED.decode(said)
        raise AssertionError("the last try returned or raised")

    async def delete(self) -> None:
        """What fails here expires at the server."""
        try:
            async with (
                asyncio.timeout(DELETE_S),
                self._http.delete(self._url, headers=self._headers) as response,
            ):
                if response.status not in (204, 404, 410):
                    logger.warning("action=session_not_deleted status=%d", response.status)
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.warning("action=session_not_deleted error=%r", error)

    async def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        async with (
            asyncio.timeout(SEAL_S),
            self._http.post(self._url + path, data=body, headers=self._headers) as response,
        ):
            return response.status, await response.read()


class SessionServers:
    def __init__(self, http: aiohttp.ClientSession, urls: Sequence[str]) -> None:
        self._http = http
        self._replicas = Replicas(urls)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, settings: Sessions) -> AsyncIterator["SessionServers"]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as http:
            yield cls(http, settings.urls)

    @contextlib.asynccontextmanager
    async def session(self, asked: Mapping[str, Any]) -> AsyncIterator[AgentSession]:
        """Deleted whatever happens, cancellation included; its sealed files stay."""
        creating = asyncio.create_task(self._create(asked))
        try:
            server, session = await asyncio.shield(creating)
            with server.busy():
                yield session
        finally:
            await run_to_completion(asyncio.create_task(_delete(creating)))

    async def _create(self, asked: Mapping[str, Any]) -> tuple[Replica, AgentSession]:
        troubles: list[str] = []
        for _ in self._replicas.all:
            server = self._replicas.choose()
            try:
                async with (
                    asyncio.timeout(CREATE_S),
                    self._http.post(f"{server.url}/sessions", data=orjson.dumps(asked)) as response,
                ):
                    body = await response.read()
            except (aiohttp.ClientError, TimeoutError) as error:
                server.mark_unreachable()
                troubles.append(f"{server.url}: {error!r}")
                continue
            if response.status == 200:
                made = orjson.loads(body)
                return server, AgentSession(self._http, made["base_url"], made["secret"])
            if response.status != 503:
                raise InfrastructureFailure(f"{server.url} makes no session: {response.status}, {_error(body)}")
            troubles.append(f"{server.url}: {_error(body)}")
        raise EngineUnreachable(
            f"no session server takes a session ({'; '.join(troubles)}): are they running, is sessions.urls right?"
        )


async def _delete(creating: "asyncio.Task[tuple[Replica, AgentSession]]") -> None:
    await asyncio.wait([creating])
    if not creating.cancelled() and not creating.exception():
        await creating.result()[1].delete()


def _error(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return repr(body[:200])

"""Sessions of a session server, for agents that only get a URL. A rollout creates its session,
seals it, and always deletes it.

All servers are equivalent. A rollout stays with the server that created its session.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec
import orjson

from headpond.config.sessions import Sessions
from headpond.engines.replicas.selection import Replica, Replicas
from headpond.errors import (
    UNWRITTEN,
    BlobUnwritten,
    EngineUnreachable,
    HeadpondError,
    InfrastructureFailure,
    NothingToTrain,
    Upstream,
)
from headpond.event_loop.cancellation import opening
from headpond.playing.posted_scores import PostedScore
from headpond.records.rollout import Recorded
from headpond.spans import TimedSpan

logger = logging.getLogger("headpond.playing")


REFUSALS: Mapping[int, type[HeadpondError]] = {
    UNWRITTEN: BlobUnwritten,
    Upstream.status_code: EngineUnreachable,
    NothingToTrain.status_code: NothingToTrain,
}
CONNECT_S = 5.0
CREATE_S = 30.0  # The server creates a few files: seconds if it has no free threads.
SEAL_S = 300.0  # A rollout may have gigabytes of routed rows, on a slow disk.
SEAL_ATTEMPTS, SEAL_PAUSE_S = 20, 0.5  # A restarted server gives the same response as before.
DELETE_S = 10.0
ERROR_CHARACTERS = 2_000


class AgentSession:
    """One session: the URL and key for the agent, and the calls that seal and delete it."""

    def __init__(self, http: aiohttp.ClientSession, base_url: str, secret: str, control_secret: str) -> None:
        self.base_url = base_url
        self.secret = secret  # Key for chats. The agent does not get the other key.
        self.control_secret = control_secret
        self._http = http
        self._url = base_url.removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {control_secret}"}

    async def seal(
        self, error: str, turn_rewards: Sequence[float] | None = None, spans: Sequence[TimedSpan] = ()
    ) -> tuple[Recorded, PostedScore]:
        """Return the recorded rollout and the posted score. Raise NothingToTrain if the agent
        sent no request."""
        rewards = {} if turn_rewards is None else {"turn_rewards": turn_rewards}
        body = orjson.dumps({"error": error[:ERROR_CHARACTERS], **rewards, "spans": [*map(tuple, spans)]})
        for attempt in range(1, SEAL_ATTEMPTS + 1):
            try:
                status, response = await self._post_seal(body)
            except (aiohttp.ClientError, TimeoutError) as failure:
                if attempt == SEAL_ATTEMPTS:
                    raise InfrastructureFailure(f"the session server did not seal: {failure!r}") from failure
                await asyncio.sleep(SEAL_PAUSE_S)
                continue
            if status in REFUSALS:
                raise REFUSALS[status](_error(response))
            if status != 200:
                raise InfrastructureFailure(f"the session server did not seal: {status}, {_error(response)}")
            answer = orjson.loads(response)
            posted = msgspec.convert(answer.pop("score"), PostedScore)
            return Recorded.model_validate(answer), posted
        raise AssertionError("the last attempt returned or raised")

    async def delete(self) -> None:
        """Delete the session. Failures are logged; the session then expires at the server."""
        try:
            async with (
                asyncio.timeout(DELETE_S),
                self._http.delete(self._url, headers=self._headers) as response,
            ):
                if response.status not in (204, 404, 410):
                    logger.warning("action=session_not_deleted status=%d", response.status)
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.warning("action=session_not_deleted error=%r", error)

    async def _post_seal(self, body: bytes) -> tuple[int, bytes]:
        async with (
            asyncio.timeout(SEAL_S),
            self._http.post(f"{self._url}/seal", data=body, headers=self._headers) as response,
        ):
            return response.status, await response.read()


class SessionServers:
    def __init__(self, http: aiohttp.ClientSession, settings: Sessions) -> None:
        self._http = http
        self._replicas = Replicas(settings.urls)
        key = settings.create_key
        self._headers = {"Authorization": f"Bearer {key.get_secret_value()}"} if key else {}

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, settings: Sessions) -> AsyncIterator["SessionServers"]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as http:
            yield cls(http, settings)

    @contextlib.asynccontextmanager
    async def session(self, request: Mapping[str, Any]) -> AsyncIterator[AgentSession]:
        """Create a session and delete it at the end, even on cancellation. Its sealed files
        remain."""
        async with opening(self._create(request), lambda created: created[1].delete()) as (server, session):
            with server.busy():
                yield session

    async def _create(self, request: Mapping[str, Any]) -> tuple[Replica, AgentSession]:
        errors: list[str] = []
        for _ in self._replicas.all:
            server = self._replicas.choose()
            try:
                async with (
                    asyncio.timeout(CREATE_S),
                    self._http.post(
                        f"{server.url}/sessions", data=orjson.dumps(request), headers=self._headers
                    ) as response,
                ):
                    body = await response.read()
            except (aiohttp.ClientError, TimeoutError) as error:
                server.mark_unreachable()
                errors.append(f"{server.url}: {error!r}")
                continue
            if response.status == 200:
                created = orjson.loads(body)
                secrets = created["secret"], created["control_secret"]
                return server, AgentSession(self._http, created["base_url"], *secrets)
            if response.status == UNWRITTEN:
                raise BlobUnwritten(_error(body))
            if response.status != 503:
                raise InfrastructureFailure(f"{server.url} did not create a session: {response.status}, {_error(body)}")
            errors.append(f"{server.url}: {_error(body)}")
        raise EngineUnreachable(
            f"no session server accepts a session ({'; '.join(errors)}): are they running, is sessions.urls right?"
        )


def _error(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return repr(body[:200])

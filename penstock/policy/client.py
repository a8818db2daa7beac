"""The one HTTP client of a process: bounded connections and bytes, retries with jitter, failures in two kinds.

Traps of aiohttp: a connection that the server closed while it was idle fails at the next POST and is not tried again;
`sock_read` counts while an answer is awaited, but not while we hold reading back; the time-out `connect` would count
waiting for a free connection, so only `sock_connect` is set.
"""

import contextlib
import errno
import io
import logging
import resource
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

import aiohttp

from penstock.errors import InfrastructureFailure, PolicyFailure, Upstream
from penstock.offload import in_cpu_thread
from penstock.policy.byte_budget import ByteBudget, Share
from penstock.policy.patience import Patience
from penstock.policy.replicas import Replica, Replicas
from penstock.rollout_config import Engine

T = TypeVar("T")

logger = logging.getLogger("penstock.policy")

# vLLM's server closes idle connections after 5 s: forget them before it does.
KEEP_ALIVE_S = 4.0
# Reading a body on the loop costs up to ~1 ms per 128 KiB (0.64 ms for 90 kB with 1,000 tokens); a thread hop 0.1 ms.
ON_LOOP_BYTES = 128 * 1024
# Larger bodies are sent from a file object: aiohttp would copy them in one piece.
SENT_AT_ONCE_BYTES = 1 << 20
# Of an error's text: enough to see what it is about.
ERROR_BYTES = 4096
# File descriptors that are not for the engine: Redis, files, the loop itself.
OTHER_DESCRIPTORS = 256
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


class EngineClient:
    """Made by `open`, once a process, on its loop."""

    def __init__(self, settings: Engine, http: aiohttp.ClientSession) -> None:
        self.settings = settings
        self.replicas = Replicas(settings.urls)
        self.budget = ByteBudget(settings.received_bytes)
        self._http = http

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, settings: Engine) -> AsyncIterator["EngineClient"]:
        key = settings.api_key
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=_affordable(settings.connections), keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.silence_s
            ),
            headers={
                "Content-Type": "application/json",
                "Accept-Encoding": "identity",
                **({"Authorization": f"Bearer {key.get_secret_value()}"} if key else {}),
            },
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as http:
            yield cls(settings, http)

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
                _raise_if_out_of_descriptors(error)
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
        url, body = replica.url + request.path, request.body
        data = body if len(body) < SENT_AT_ONCE_BYTES else io.BytesIO(body)
        headers = {**request.headers, "X-Retry-Count": str(tries)}
        with replica.busy(), self.budget.share() as share:
            async with self._http.post(url, data=data, headers=headers, allow_redirects=False) as response:
                if response.status != 200:
                    _refuse(url, response.status, await response.content.read(ERROR_BYTES))
                chunks = await self._receive(response, share)
            if share.held <= ON_LOOP_BYTES:
                return read(b"".join(chunks))
            return await in_cpu_thread(_read_chunks, chunks, read)

    async def _receive(self, response: aiohttp.ClientResponse, share: Share) -> list[bytes]:
        """The body as it came: joining megabytes would hold up the loop."""
        await self._reserve(share, response.content_length or 0)
        chunks, received = list[bytes](), 0
        async for chunk in response.content.iter_any():
            received += len(chunk)
            if received > share.held:
                await self._reserve(share, received - share.held)
            chunks.append(chunk)
        return chunks

    async def _reserve(self, share: Share, size: int) -> None:
        if share.held + size > self.budget.limit:
            raise InfrastructureFailure(
                f"an answer of the engine has more than {self.budget.limit} bytes: raise engine.received_bytes"
            )
        await share.reserve(size)


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


def _raise_if_out_of_descriptors(error: Exception) -> None:
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        raise InfrastructureFailure(
            f"cannot connect to the engine: {error.strerror}; raise `ulimit -n` or lower engine.connections"
        ) from error


def _affordable(connections: int) -> int:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY or connections + OTHER_DESCRIPTORS <= files:
        return connections
    affordable = max(1, files - OTHER_DESCRIPTORS)
    logger.warning(
        "action=fewer_connections wanted=%d affordable=%d: this process may open %d files; raise `ulimit -n`",
        connections,
        affordable,
        files,
    )
    return affordable

"""How bodies come from an engine: bounded connections, and bytes that are received only when there is room for them.

Traps of aiohttp: a connection that the server closed while it was idle fails at the next POST and is not tried again;
`sock_read` counts while an answer is awaited, but not while we hold reading back; the time-out `connect` would count
waiting for a free connection, so only `sock_connect` is set; `iter_any` joins what has gathered, and `iter_chunks` has
no end where an answer has no body (204).
"""

import asyncio
import contextlib
import errno
import io
import logging
import resource
import time
from collections.abc import AsyncIterator, Generator
from typing import Self

import aiohttp

from penstock.config.engine import Engine
from penstock.engines.replicas import Replicas
from penstock.errors import InfrastructureFailure
from penstock.runtime.offload import cores


class Share:
    """What one body holds of a budget."""

    def __init__(self, budget: "ByteBudget") -> None:
        self._budget = budget
        self.held = 0

    async def reserve(self, size: int) -> None:
        """Wait until `size` more bytes may be received."""
        await self._budget.reserve(self, size)


class ByteBudget:
    def __init__(self, limit: int, *, copies: int = 0, buffered: int = 0, lost: float = 0.0) -> None:
        self.limit = limit
        self._copies = copies
        self._buffered = buffered
        self._lost = lost
        self._largest = 0
        self.used = self.most_used = 0
        self._holders: dict[Share, None] = {}  # oldest first
        self._waiting: dict[Share, tuple[int, asyncio.Future[None]]] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @contextlib.contextmanager
    def share(self) -> Generator[Share]:
        """Everything that was reserved is given back at the end."""
        share = Share(self)
        try:
            yield share
        finally:
            self._holders.pop(share, None)
            self.used -= share.held
            self._admit()

    async def reserve(self, share: Share, size: int) -> None:
        granted = asyncio.get_running_loop().create_future()
        self._waiting[share] = (size, granted)
        self._admit()
        try:
            await granted
        finally:
            if self._waiting.pop(share, None):  # cancelled before its turn: the next one may fit
                self._admit()

    def _admit(self) -> None:
        while self._waiting:
            oldest = next(iter(self._holders), None)
            share = oldest if oldest in self._waiting else next(iter(self._waiting))
            size, granted = self._waiting[share]
            if share is not oldest and not self._fits(share, size):
                return
            del self._waiting[share]
            self.used += size
            self.most_used = max(self.most_used, self.used)
            share.held += size
            self._largest = max(self._largest, share.held)
            self._holders[share] = None
            if not granted.done():
                granted.set_result(None)

    def _fits(self, share: Share, size: int) -> bool:
        if not self.used:  # a body that leaves no room for its copies is received alone
            return size <= self.limit
        beside = self._copies * max(self._largest, share.held + size)
        beside += self._buffered * (len(self._waiting) - 1) + self._lost * (self.used + size)
        return self.used + size + min(beside, self.limit // 2) <= self.limit


logger = logging.getLogger("penstock.engines")

# vLLM's server closes idle connections after 5 s: forget them before it does.
KEEP_ALIVE_S = 4.0
# Its 5 s begin when it has handed over the last byte, which may lie in our socket while the byte budget or a busy loop
# keeps us from reading. So a connection on which an answer took longer than this to read is not used again: of 64
# rollouts with answers of 25 MB, some met five closed connections in a row.
READ_S = 0.5
# What a connection takes from its socket before anybody reads: aiohttp stops above 128 KiB, after one read of uvloop,
# which may be 256 KiB. A thousand answers that wait for the byte budget are 0.4 GB.
BUFFERED_BYTES = 384 * 1024
# Of received bytes, between pieces of all sizes: 1,000 answers of 1.3 MB made a worker grow 17 % above the budget.
LOST = 0.25
# Reading a body on the loop costs up to ~1 ms per 128 KiB (0.64 ms for 90 kB with 1,000 tokens); a thread hop 0.1 ms.
ON_LOOP_BYTES = 128 * 1024
# Larger bodies are sent from a file object: aiohttp would copy them in one piece.
SENT_AT_ONCE_BYTES = 1 << 20
# File descriptors that are not for the engine: Redis, files, the loop itself.
OTHER_DESCRIPTORS = 256
UNREACHABLE = "the engine cannot be reached"
"""Begins what a session server says where no connection is made: who hears it knows that waiting helps."""


@contextlib.asynccontextmanager
async def open_http(settings: Engine) -> AsyncIterator[aiohttp.ClientSession]:
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
        yield http


class EngineConnection:
    """What talking to an engine takes: its replicas, its connections, room for its answers. Made by `open`, on the loop
    that uses it."""

    def __init__(self, settings: Engine, http: aiohttp.ClientSession) -> None:
        self.settings = settings
        self.replicas = Replicas(settings.urls)
        self.budget = ByteBudget(settings.received_bytes, copies=cores(), buffered=BUFFERED_BYTES, lost=LOST)
        self._http = http

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, settings: Engine) -> AsyncIterator[Self]:
        async with open_http(settings) as http:
            yield cls(settings, http)


def sendable(body: bytes) -> bytes | io.BytesIO:
    return body if len(body) < SENT_AT_ONCE_BYTES else io.BytesIO(body)


async def receive(response: aiohttp.ClientResponse, share: Share, budget: ByteBudget) -> list[bytes]:
    """The body as it came: joining megabytes would hold up the loop."""
    began = time.monotonic()
    await _reserve(share, budget, response.content_length or 0)
    chunks, received, content = list[bytes](), 0, response.content
    while not content.at_eof():
        if time.monotonic() - began > READ_S:
            _use_no_more(response.connection)
        chunk, _ = await content.readchunk()
        received += len(chunk)
        if received > share.held:
            await _reserve(share, budget, received - share.held)
        chunks.append(chunk)
    if error := content.exception():
        raise error
    return chunks


def _use_no_more(connection: aiohttp.connector.Connection | None) -> None:
    if connection is not None and connection.protocol is not None:  # else it was released with the last byte
        connection.protocol.force_close()


async def _reserve(share: Share, budget: ByteBudget, size: int) -> None:
    if share.held + size > budget.limit:
        raise InfrastructureFailure(
            f"an answer of the engine has more than {budget.limit} bytes: raise engine.received_bytes"
        )
    await share.reserve(size)


def raise_if_out_of_descriptors(error: Exception) -> None:
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

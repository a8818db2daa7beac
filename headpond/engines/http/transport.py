"""HTTP transport to a server: bounded connections, names of requests, and a byte budget for
received bodies.

A name shows that a response answers its own request. `receive` reads a body within the budget.
"""

import asyncio
import contextlib
import errno
import io
import logging
import resource
import secrets
import select
import time
import weakref
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from itertools import count
from typing import Self

import aiohttp
from aiohttp import hdrs
from aiohttp.abc import AbstractStreamWriter
from aiohttp.client_proto import ResponseHandler
from multidict import CIMultiDict

from headpond.config.engine import Engine
from headpond.engines.http.receiver import READ_BYTES, Buffers, attach, is_new, receiver_of
from headpond.engines.replicas.control import EngineControl, polling
from headpond.engines.replicas.selection import CONNECTED, Replica, Replicas
from headpond.errors import ConfigError, InfrastructureFailure, Upstream
from headpond.event_loop.offload import cores
from headpond.turn import Body

logger = logging.getLogger("headpond.engines")

# vLLM's server closes idle connections after 5 s; they are dropped before that. A POST on a
# connection that the server closed while idle would fail, and aiohttp does not retry it.
KEEP_ALIVE_S = 4.0
# vLLM counts its 5 s from the time when it handed over the last byte. That byte may wait in our
# socket while the byte budget or a busy loop delays reading. So a connection whose response took
# longer than this to read is not reused: of 64 rollouts with responses of 25 MB, some met five
# closed connections in a row.
SLOW_READ_S = 0.5
# Bytes that a connection reads from its socket before the body is consumed: aiohttp pauses above
# 128 KiB, after one read of uvloop, which may be 256 KiB. A thousand responses that wait for the
# byte budget hold 0.4 GB.
BUFFERED_BYTES = 384 * 1024
# Share of received bytes lost to fragmentation: with 1,000 responses of 1.3 MB a worker grew 17 % above the budget.
FRAGMENTATION = 0.25
# Reading a body on the loop costs up to ~1 ms per 128 KiB (0.64 ms for 90 kB with 1,000 tokens); a thread hop 0.1 ms.
ON_LOOP_BYTES = 128 * 1024
# Larger bodies are sent from a file object: aiohttp would copy them in one piece.
SENT_AT_ONCE_BYTES = 1 << 20
# File descriptors kept for everything else: Redis, files, the loop.
OTHER_DESCRIPTORS = 256
CLOSE = "close"
NAME_HEADER = "X-Request-Id"
# Bytes of a response that are searched for its name: vLLM and SGLang begin with it.
CHECKED_BYTES = 512
# Header with `ids.engine_session`. It lets an engine, or a router before several, keep a
# conversation on one replica.
SESSION_HEADER = "X-Session-ID"
RETRY_HEADER = "X-Retry-Count"  # Header with the number of earlier attempts of the request.
# Begins the session server's error when it cannot connect. Clients recognise it as temporary.
UNREACHABLE = "the engine cannot be reached"


class Reservation:
    """The bytes of a budget that one body holds."""

    def __init__(self, budget: "ByteBudget") -> None:
        self._budget = budget
        self.held = 0
        # The buffer of a body that is received in one piece. It is given back with the
        # reservation.
        self.buffer: bytearray | None = None

    async def reserve(self, size: int) -> None:
        """Wait until `size` more bytes may be received."""
        await self._budget.reserve(self, size)


class ByteBudget:
    """Limits the bytes held by all bodies together.

    The oldest body always gets all it needs, so that one finishes. The others wait in order.
    """

    def __init__(self, limit: int, *, copies: int = 0, buffered: int = 0, fragmentation: float = 0.0) -> None:
        """`copies` of the largest body may exist at once. Each waiting body has `buffered` bytes in
        its connection. `fragmentation` is the share of received bytes that the allocator loses."""
        self.limit = limit
        self._copies = copies
        self._buffered = buffered
        self._fragmentation = fragmentation
        self._largest = 0
        self.used = self.most_used = 0
        self.buffers = Buffers()
        self._holders: dict[Reservation, None] = {}  # oldest first
        self._waiting: dict[Reservation, tuple[int, asyncio.Future[None]]] = {}

    def buffer(self, size: int) -> bytearray:
        """A buffer for a body whose bytes are reserved."""
        return self.buffers.take(size, limit=self._kept_limit)

    @property
    def _kept_limit(self) -> int:
        """Limit of the buffers that no body uses: half of the bytes left. The other half is for the
        overhead of bodies."""
        return min(self.limit // 4, max(0, self.limit - self.used) // 2)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @contextlib.contextmanager
    def reservation(self) -> Generator[Reservation]:
        """A reservation whose bytes are released at the end."""
        reservation = Reservation(self)
        try:
            yield reservation
        finally:
            self._holders.pop(reservation, None)
            self.used -= reservation.held
            self.buffers.give_back(reservation, limit=self._kept_limit)
            self._admit()

    async def reserve(self, reservation: Reservation, size: int) -> None:
        granted = asyncio.get_running_loop().create_future()
        self._waiting[reservation] = (size, granted)
        self._admit()
        try:
            await granted
        finally:
            if self._waiting.pop(reservation, None):  # cancelled while waiting: the next one may fit
                self._admit()

    def _admit(self) -> None:
        while self._waiting:
            oldest = next(iter(self._holders), None)
            reservation = oldest if oldest in self._waiting else next(iter(self._waiting))
            size, granted = self._waiting[reservation]
            if reservation is not oldest and not self._fits(reservation, size):
                return
            del self._waiting[reservation]
            self.used += size
            self.most_used = max(self.most_used, self.used)
            reservation.held += size
            self._largest = max(self._largest, reservation.held)
            self._holders[reservation] = None
            if not granted.done():
                granted.set_result(None)

    def _fits(self, reservation: Reservation, size: int) -> bool:
        if not self.used:  # a body that leaves no room for its copies is received alone
            return size <= self.limit
        overhead = self._copies * max(self._largest, reservation.held + size)
        overhead += self._buffered * (len(self._waiting) - 1) + self._fragmentation * (self.used + size)
        return self.used + size + min(overhead, self.limit // 2) <= self.limit


class IdleConnector(aiohttp.TCPConnector):
    """Reuses a connection only if nothing was received on it since its last response.

    aiohttp would pass an engine's unasked bytes to the next request, which may be another
    session's. A request with `Connection: close` gets a connection of its own. Its response has no
    name, so bytes that arrive after this check would look like it.
    """

    def __init__(self, *, limit: int, keepalive_timeout: float) -> None:
        super().__init__(limit=limit, keepalive_timeout=keepalive_timeout)
        self._reusable = weakref.WeakKeyDictionary[ResponseHandler, bool]()
        self._scratch = memoryview(bytearray(READ_BYTES))

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[aiohttp.tracing.Trace], timeout: aiohttp.ClientTimeout
    ) -> aiohttp.connector.Connection:
        alone = req.headers.get(hdrs.CONNECTION) == CLOSE
        for _ in range(self.limit + 1):
            connection = await super().connect(req, traces, timeout)
            new = connection.protocol not in self._reusable
            if not self._may_carry(connection, alone=alone):
                connection.close()
            elif not _has_input(connection):
                attach(connection, self._scratch)
                if new:
                    await _connected(connection)
                return connection
            else:
                connection.close()
                logger.warning("action=connection_dropped host=%s: it sent what was not asked for", req.url.host)
        raise aiohttp.ClientConnectionError("every connection to it has unread bytes before a request was sent")

    def _may_carry(self, connection: aiohttp.connector.Connection, *, alone: bool) -> bool:
        if connection.protocol is None:
            return False
        reusable = self._reusable.get(connection.protocol)
        self._reusable[connection.protocol] = not alone
        return reusable is None or (reusable and not alone)


async def _connected(connection: aiohttp.connector.Connection) -> None:
    if connected := CONNECTED.get():
        try:
            await connected()
        except BaseException:
            connection.close()
            raise


class UnansweredRequest(aiohttp.ClientRequest):
    """Checks the connection again directly before the first byte: aiohttp may write it a step of
    the loop after `connect`.

    Bytes that arrived meanwhile answer another request. So this one fails without being sent.
    """

    async def write_bytes(
        self, writer: AbstractStreamWriter, conn: aiohttp.connector.Connection, content_length: int | None = None
    ) -> None:
        if _has_input(conn) and conn.protocol is not None:
            conn.protocol.set_exception(aiohttp.ClientConnectionError("bytes arrived before the request was sent"))
        else:
            await super().write_bytes(writer, conn, content_length)


def _has_input(connection: aiohttp.connector.Connection) -> bool:
    """Whether bytes have been received, or wait in the socket. A socket that the server closed
    counts too."""
    protocol, transport = connection.protocol, connection.transport
    if protocol is None or transport is None or protocol.should_close:
        return True
    if transport.get_extra_info("ssl_object") and is_new(transport):
        return False  # TLS 1.3 sends session tickets behind the handshake
    readable = select.poll()
    readable.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(readable.poll(0))


@contextlib.asynccontextmanager
async def open_http(settings: Engine) -> AsyncIterator[aiohttp.ClientSession]:
    key = settings.api_key
    async with aiohttp.ClientSession(
        connector=IdleConnector(limit=_affordable_connections(settings.connections), keepalive_timeout=KEEP_ALIVE_S),
        # Only `sock_connect` is set: `connect` would count waiting for a free connection.
        # `sock_read` counts while a response is awaited, but not while reading is held back.
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.silence_s
        ),
        headers={
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            **({"Authorization": f"Bearer {key.get_secret_value()}"} if key else {}),
        },
        cookie_jar=aiohttp.DummyCookieJar(),
        request_class=UnansweredRequest,
    ) as http:
        yield http


class RequestNames:
    """Names of requests. One instance per process and engine.

    vLLM repeats the header `X-Request-Id` in the `id` of its response, SGLang the field `rid` of
    the request. On a reused connection, nothing else distinguishes a response from bytes that the
    server sent before the request came.
    """

    def __init__(self) -> None:
        self._prefix = f"headpond-{secrets.token_hex(8)}-"
        self._numbers = count(1)

    def next(self) -> str:
        return f"{self._prefix}{next(self._numbers):012x}"

    def check(self, replica: Replica, name: str, head: bytes) -> None:
        """`Upstream` if a response with this `head` answers another request than `name`.

        A replica that named its last request must name this one. Until it does, each of its
        connections is used once (`IdleConnector`).
        """
        if name.encode() in head:
            replica.names_requests = True
            return
        if replica.names_requests or self._prefix.encode() in head:
            replica.names_requests = False
            logger.warning("action=response_refused engine=%s: it does not name the request %s", replica.url, name)
            raise Upstream("the engine's response does not name its request: it answers another one")


class EngineConnection:
    """Replicas, connections and byte budget of one engine. Created by `open` on the loop that uses it."""

    def __init__(self, settings: Engine, http: aiohttp.ClientSession) -> None:
        self.settings = settings
        self.replicas = Replicas(settings.urls, reported=settings.versions == "reported", lora=settings.lora)
        self.budget = ByteBudget(
            settings.received_bytes, copies=cores(), buffered=BUFFERED_BYTES, fragmentation=FRAGMENTATION
        )
        self._http = http
        self._names = RequestNames()

    def _named(
        self, replica: Replica, headers: Mapping[str, str], name: str | None, *, alone: bool = False
    ) -> CIMultiDict[str]:
        """The headers of a request: its name, and whether its connection may be used again.

        `name` is None if the response will not repeat it. With `alone`, the request gets its own
        connection all the same.
        """
        named = CIMultiDict(headers)
        if name:
            named[NAME_HEADER] = name
        if alone or not (name and replica.names_requests):
            named[hdrs.CONNECTION] = CLOSE
        return named

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, settings: Engine) -> AsyncIterator[Self]:
        async with open_http(settings) as http, contextlib.AsyncExitStack() as stack:
            connection = cls(settings, http)
            replicas = connection.replicas.all
            with contextlib.suppress(ConfigError):  # reported where the dialect is used
                control = await stack.enter_async_context(EngineControl.open(settings))
                if settings.versions == "reported":
                    await stack.enter_async_context(polling(control.poll_version, replicas))
                await stack.enter_async_context(polling(control.poll_load, replicas))
            yield connection


def sendable(body: bytes) -> bytes | io.BytesIO:
    return body if len(body) < SENT_AT_ONCE_BYTES else io.BytesIO(body)


@contextlib.asynccontextmanager
async def limited(settings: Engine) -> AsyncIterator[None]:
    """`Upstream` if a request takes longer than `engine.response_s`."""
    limit_s = settings.response_s
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise Upstream(f"the engine's response was not complete after {limit_s:g} s (engine.response_s)") from None


async def receive(response: aiohttp.ClientResponse, reservation: Reservation, budget: ByteBudget) -> list[Body]:
    """The body, in one piece if it is large and its length was announced. Otherwise it is in
    chunks, since joining megabytes would block the loop."""
    began = time.monotonic()
    await _reserve(reservation, budget, response.content_length or 0)
    chunks, received, content = list[Body](), 0, response.content
    if receiver := receiver_of(response):
        reservation.buffer = budget.buffer(response.content_length or 0)
        await receiver.receive(content, reservation.buffer)
        if time.monotonic() - began > SLOW_READ_S:
            do_not_reuse(response.connection)
        if not content.is_eof():
            content.feed_eof()  # releases the connection
        return [reservation.buffer]
    while not content.at_eof():
        if time.monotonic() - began > SLOW_READ_S:
            do_not_reuse(response.connection)
        # Not `iter_any`, which joins buffered chunks, nor `iter_chunks`, which never ends for a
        # response without a body (204).
        chunk, _ = await content.readchunk()
        received += len(chunk)
        if received > reservation.held:
            await _reserve(reservation, budget, received - reservation.held)
        chunks.append(chunk)
    if error := content.exception():
        raise error
    return chunks


def head_of(chunks: Sequence[Body]) -> bytes:
    head = b""
    for chunk in chunks:
        head += chunk[:CHECKED_BYTES]
        if len(head) >= CHECKED_BYTES:
            break
    return head[:CHECKED_BYTES]


def joined(chunks: list[Body]) -> Body:
    """The whole body. The list is emptied, so that only the caller refers to it."""
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    chunks.clear()
    return body


def do_not_reuse(connection: aiohttp.connector.Connection | None) -> None:
    if connection is not None and connection.protocol is not None:  # None once released with the last byte
        connection.protocol.force_close()


async def _reserve(reservation: Reservation, budget: ByteBudget, size: int) -> None:
    if reservation.held + size > budget.limit:
        raise InfrastructureFailure(
            f"a response of the engine exceeds {budget.limit} bytes: raise engine.received_bytes"
        )
    await reservation.reserve(size)


def raise_if_out_of_descriptors(error: Exception) -> None:
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        raise InfrastructureFailure(
            f"cannot connect to the engine: {error.strerror}; raise `ulimit -n` or lower engine.connections"
        ) from error


def _affordable_connections(connections: int) -> int:
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

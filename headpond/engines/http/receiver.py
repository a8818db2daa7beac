"""Bodies of known length are received into one buffer that is used again. aiohttp reads the rest of
a connection.

aiohttp copies all input twice, each time into fresh pages, which the kernel has to clear. A
`Receiver` stands between a connection and aiohttp's protocol. Heads, and chunked, compressed and
short bodies pass through it unchanged.
"""

import asyncio
import ctypes
import sys
from typing import Any, Protocol

import aiohttp
from aiohttp.client_proto import ResponseHandler

# A response's first read: its head, and little that would be copied. Later reads are as large as uvloop's own.
HEAD_BYTES, READ_BYTES = 1 << 14, 1 << 18
# Shorter bodies arrive with their head or soon after it: a buffer of their own gains nothing.
LEAST_BYTES = 1 << 16
# Bodies have one of 8 sizes between two powers of two, so that most buffers fit the next body.
SIZES_A_DOUBLING = 8

_resize = ctypes.pythonapi.PyByteArray_Resize
_resize.argtypes, _resize.restype = (ctypes.py_object, ctypes.c_ssize_t), ctypes.c_int
# References to a buffer that only `give_back` has: its variable and getrefcount's argument.
UNUSED = 2


class Holder(Protocol):
    buffer: bytearray | None


class Buffers:
    """Buffers for the next bodies. The limit of their bytes changes with the bytes that bodies use."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []  # least recently used first
        self.kept_bytes = 0

    def take(self, size: int, *, limit: int) -> bytearray:
        """A buffer of `size` bytes, with the bytes of an earlier body."""
        capacity = _capacity(size)
        for index in reversed(range(len(self._free))):
            if len(self._free[index]) == capacity:
                buffer = self._free.pop(index)
                self.kept_bytes -= capacity
                break
        else:
            buffer = bytearray()
            _resize(buffer, capacity)  # unlike bytearray(capacity), this writes to none of its pages
            self._shrink(limit)
        _resize(buffer, size)
        return buffer

    def give_back(self, holder: Holder, *, limit: int) -> None:
        """Keep a holder's buffer, unless a view of it exists or a thread still reads it."""
        buffer, holder.buffer = holder.buffer, None
        if buffer is None or sys.getrefcount(buffer) > UNUSED:
            return
        capacity = _capacity(len(buffer))
        _resize(buffer, capacity)
        self._free.append(buffer)
        self.kept_bytes += capacity
        self._shrink(limit)

    def _shrink(self, limit: int) -> None:
        while self.kept_bytes > limit:
            self.kept_bytes -= len(self._free.pop(0))


def _capacity(size: int) -> int:
    """Less than twice `size`: bytearrays keep their memory only while more than half of it is used."""
    step = max(1, (1 << size.bit_length()) // (2 * SIZES_A_DOUBLING))
    return -(-size // step) * step


class Receiver(asyncio.BufferedProtocol):
    """The protocol of one connection. All connections of a loop share `scratch`: a read is handled
    before the next one."""

    def __init__(self, handler: ResponseHandler, transport: asyncio.Transport, scratch: memoryview) -> None:
        self._handler = handler
        self._transport = transport
        self._scratch = scratch
        self._loop = asyncio.get_running_loop()
        self._at_head = True
        self.requests = 0
        # True between a body received here and the next request: aiohttp's parser still
        # waits for that body.
        self._idle = False
        # The part of a body's buffer that is still to be filled.
        self._rest: memoryview | None = None
        self._whole: asyncio.Future[None] | None = None
        self._last_read_s = 0.0
        self._silence: asyncio.TimerHandle | None = None

    def expect_head(self) -> None:
        self._at_head, self._idle = True, False
        self.requests += 1

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._rest is not None:
            return self._rest
        return self._scratch[:HEAD_BYTES] if self._at_head else self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self._rest is not None:
            self._last_read_s = self._loop.time()
            self._rest = self._rest[nbytes:]
            if not self._rest:
                self._rest = None
                self._transport.pause_reading()  # else a loop that reads until nothing is left goes on
                self._settle()
            return
        if self._idle:  # not asked for
            self._handler.force_close()
            self._transport.pause_reading()
            return
        more = self._at_head and nbytes == HEAD_BYTES
        self._at_head = False
        self._handler.data_received(bytes(self._scratch[:nbytes]))
        if more and self._transport.is_reading():  # the task that reads the head takes the body before `_go_on`
            self._transport.pause_reading()
            self._loop.call_soon(self._go_on)

    async def receive(self, content: aiohttp.StreamReader, buffer: bytearray) -> None:
        """Receive the rest of a body. `content` has the part that arrived with its head."""
        unfilled = memoryview(buffer)
        while first := content.read_nowait():  # reading may let aiohttp parse what it had held back
            unfilled[: len(first)] = first
            unfilled = unfilled[len(first) :]
        if content.is_eof():
            if unfilled:  # the buffer has bytes of an earlier body there
                raise aiohttp.ClientPayloadError(
                    f"Response payload is not completed: {len(unfilled)} bytes are missing"
                )
            return
        self._handler.pause_reading()  # ends aiohttp's own time limit
        self._rest, self._whole, self._last_read_s = unfilled, self._loop.create_future(), self._loop.time()
        del unfilled
        self._check_silence()
        try:
            self._transport.resume_reading()
            await self._whole
        finally:
            self._rest = self._whole = None
            if self._silence:
                self._silence.cancel()
        self._idle = True
        if self._transport.get_extra_info("ssl_object"):  # more may be decrypted already, unseen at the socket
            self._transport.resume_reading()
            await asyncio.sleep(0)

    def _go_on(self) -> None:
        if self._whole is None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _check_silence(self) -> None:
        limit_s = self._handler.read_timeout
        if limit_s is None:
            return
        left_s = self._last_read_s + limit_s - self._loop.time()
        if left_s > 0:
            self._silence = self._loop.call_later(left_s, self._check_silence)
        else:
            self._settle(aiohttp.SocketTimeoutError("Timeout on reading data from socket"))

    def _settle(self, error: Exception | None = None) -> None:
        if self._whole is None or self._whole.done():
            return
        if error:
            self._whole.set_exception(error)
        else:
            self._whole.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        reason = f"the connection was closed with {exc!r}" if exc else "the connection was closed"
        error = aiohttp.ClientPayloadError(f"Response payload is not completed: {reason}")
        self._settle(error)
        body: aiohttp.StreamReader | None = self._handler._payload  # pyright: ignore[reportPrivateUsage]
        self._handler.connection_lost(exc)
        if body is not None and not body.is_eof() and body.exception() is None:  # aiohttp leaves one with a wrong chunk
            body.set_exception(error)

    def eof_received(self) -> None:
        self._handler.eof_received()

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()


def attach(connection: aiohttp.connector.Connection, scratch: memoryview) -> None:
    """Put a receiver before aiohttp's protocol, if there is none yet. Called before every request."""
    transport: Any = connection.transport
    receiver = transport.get_protocol()
    if not isinstance(receiver, Receiver):
        assert connection.protocol is not None
        receiver = Receiver(connection.protocol, transport, scratch)
        transport.pause_reading()  # uvloop chooses its way of reading when reading starts
        transport.set_protocol(receiver)
        transport.resume_reading()
    receiver.expect_head()


def is_new(transport: Any) -> bool:
    """Whether no request was answered on the transport yet."""
    receiver = transport.get_protocol()
    return not isinstance(receiver, Receiver) or receiver.requests <= 1


def receiver_of(response: aiohttp.ClientResponse) -> Receiver | None:
    """The receiver for a response's body. None if the body is short, complete, compressed or of
    unknown length."""
    size, connection = response.content_length or 0, response.connection
    if size < LEAST_BYTES or connection is None or connection.transport is None:
        return None
    if response.headers.get("Content-Encoding", "identity") != "identity" or response.content.is_eof():
        return None
    receiver: Any = connection.transport.get_protocol()
    return receiver if isinstance(receiver, Receiver) else None

"""What the receiver and aiohttp make of a response, against a plain parser: the same bytes, or a refusal by both."""

import asyncio
import contextlib
import gzip
import itertools
import select
import ssl
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpResponseParser
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.engine_clients import run
from support.redis_proxy import Authority, tls_port

from headpond.config.engine import Engine
from headpond.engines.http import receiver, transport
from headpond.engines.http.receiver import Buffers
from headpond.engines.http.transport import ByteBudget, head_of, joined, open_http, receive

MEGABYTE = 1 << 20
LIMIT = 64 * MEGABYTE


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that bodies of a few bytes have buffers of their own, and heads take several reads."""
    monkeypatch.setattr(receiver, "LEAST_BYTES", 4)
    monkeypatch.setattr(receiver, "HEAD_BYTES", 48)


def plain(data: bytes) -> bytes | None:
    """The body of a response whose connection was closed after `data`; None if it is malformed or incomplete."""
    head, end, rest = data.partition(b"\r\n\r\n")
    lines = [line.partition(b": ") for line in head.lower().split(b"\r\n")[1:]]
    headers = {name: value for name, _, value in lines}
    if not end:
        return None
    if b"transfer-encoding" in headers:
        body = _chunked(rest)
    elif b"content-length" in headers:
        length = int(headers[b"content-length"])
        body = rest[:length] if len(rest) >= length else None
    else:
        body = rest
    if body and headers.get(b"content-encoding") == b"gzip":
        try:
            return gzip.decompress(body)
        except (EOFError, OSError, zlib.error):
            return None
    return body


def _chunked(rest: bytes) -> bytes | None:
    body = b""
    while True:
        line, end, rest = rest.partition(b"\r\n")
        if not end or not line:
            return None
        try:
            size = int(line, 16)
        except ValueError:
            return None
        if rest[size : size + 2] != b"\r\n":
            return None
        if size == 0:
            return body
        body, rest = body + rest[:size], rest[size + 2 :]


def response(body: bytes, *, chunks: Sequence[int] = (), framing: str = "length", encoding: str = "") -> bytes:
    body = gzip.compress(body) if encoding == "gzip" else body
    encoded = b"Content-Encoding: gzip\r\n" if encoding == "gzip" else b""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + encoded
    if framing == "length":
        return head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    if framing == "close":
        return head + b"Connection: close\r\n\r\n" + body
    parts, at = [head + b"Transfer-Encoding: chunked\r\n\r\n"], 0
    for size in [*chunks, len(body)]:
        if piece := body[at : at + size]:
            parts.append(b"%x\r\n%b\r\n" % (len(piece), piece))
            at += size
    return b"".join([*parts, b"0\r\n\r\n"])


Script = Callable[[int], tuple[bytes, Sequence[int], bool]]
"""Number of the request -> what is sent, where it is split, and whether the connection is closed behind it."""


@contextlib.asynccontextmanager
async def serving(script: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[str, list[object]]]:
    """A server on the client's own loop: between two pieces the client reads what was sent."""
    numbers, peers = iter(range(1 << 30)), list[object]()

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0]))
                peers.append(writer.get_extra_info("peername"))
                data, splits, closes = script(next(numbers))
                bounds = [0, *sorted(split for split in splits if split < len(data)), len(data)]
                for start, end in itertools.pairwise(bounds):
                    writer.write(data[start:end])
                    for _ in range(3):
                        await asyncio.sleep(0)
                if closes:
                    return

    server = await asyncio.start_server(respond, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}/", peers


async def fetched(
    http: aiohttp.ClientSession, url: str, budget: ByteBudget, tls: ssl.SSLContext | None = None, *, once: bool = False
) -> bytes | None:
    """A copy of the body; None if it was refused. `once`: its connection is not used again."""
    headers = {"Connection": "close"} if once else {}
    with budget.reservation() as reservation:
        try:
            async with http.post(url, data=b"{}", allow_redirects=False, ssl=tls or True, headers=headers) as answer:
                chunks = await receive(answer, reservation, budget)
        except aiohttp.ClientError:
            return None
        return bytes(joined(chunks))


def body_of(size: int) -> bytes:
    return bytes(index * 31 % 251 for index in range(size))


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
TYPE = b"Content-Type: application/json\r\n"
BODY = body_of(60)


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
def test_every_split_of_a_response_gives_its_bytes(framing: str) -> None:
    data = response(body_of(60), chunks=[1, 20, 3], framing=framing)
    assert plain(data) == body_of(60)

    async def main() -> None:
        async with (
            serving(lambda number: (data, [number + 1], framing == "close")) as (url, peers),
            open_http(Engine()) as http,
        ):
            budget = ByteBudget(LIMIT)
            for _ in range(len(data)):
                assert await fetched(http, url, budget) == body_of(60)
            assert len(set(peers)) == (len(data) if framing == "close" else 1)

    run(main)


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_every_pair_of_splits_gives_the_bytes(framing: str) -> None:
    head = OK + (b"Content-Length: 7\r\n\r\n" if framing == "length" else CHUNKED)
    data = head + (body_of(7) if framing == "length" else b"5\r\n%b\r\n2\r\n%b\r\n0\r\n\r\n" % (BODY[:5], BODY[5:7]))
    pairs = list(itertools.combinations(range(1, len(data)), 2))
    assert plain(data) == body_of(7)

    async def main() -> None:
        async with serving(lambda number: (data, pairs[number], False)) as (url, peers), open_http(Engine()) as http:
            budget = ByteBudget(LIMIT)
            for pair in pairs:
                assert await fetched(http, url, budget) == body_of(7), pair
            assert len(set(peers)) == 1

    run(main)


def test_every_chunk_size_at_every_split_gives_the_bytes_up_to_where_the_response_breaks_off() -> None:
    head, body = len(OK + CHUNKED), body_of(18)
    cases = [
        (data[:end], split, end < len(data))
        for size in range(1, 19)
        for data in [OK + response(body, chunks=[size] * 18, framing="chunked").partition(TYPE)[2]]
        for split in range(head, len(data), 2)
        for end in (len(data), split + 1)
    ]

    async def main() -> None:
        async with (
            serving(lambda number: (cases[number][0], [cases[number][1]], cases[number][2])) as (url, _),
            open_http(Engine()) as http,
        ):
            budget = ByteBudget(LIMIT)
            for data, split, _ in cases:
                assert await fetched(http, url, budget) == plain(data), (data, split)

    run(main)


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_every_response_that_breaks_off_is_refused(framing: str) -> None:
    data = response(body_of(60), chunks=[1, 20, 3], framing=framing)

    async def main() -> None:
        async with (
            serving(lambda number: (data[: number + 1], [number // 2], True)) as (url, _),
            open_http(Engine()) as http,
        ):
            budget = ByteBudget(LIMIT)
            for end in range(1, len(data)):
                assert await fetched(http, url, budget) == plain(data[:end])

    run(main)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_responses_are_read_as_by_the_plain_parser(data: st.DataObject) -> None:
    """Two responses over one session: bodies, framings, splits, half of them broken off."""

    def drawn() -> tuple[bytes, list[int], bool]:
        body = body_of(data.draw(st.one_of(st.integers(0, 200), st.integers(10_000, 300_000))))
        framing = data.draw(st.sampled_from(["length", "chunked", "close"]))
        # aiohttp takes half a gzip stream for a whole one if the end of the connection is its only end.
        encoding = data.draw(st.sampled_from(["", "gzip"])) if framing != "close" else ""
        chunks = data.draw(st.lists(st.integers(1, 100_000), max_size=5))
        sent = response(body, chunks=chunks, framing=framing, encoding=encoding)
        breaks_off = data.draw(st.booleans())
        if breaks_off:
            sent = sent[: data.draw(st.integers(1, len(sent) - 1))]
        splits = data.draw(st.lists(st.integers(1, len(sent)), max_size=6))
        return sent, splits, breaks_off or framing == "close"

    scripts = [drawn(), drawn()]

    async def main() -> None:
        async with serving(lambda number: scripts[number]) as (url, _), open_http(Engine()) as http:
            budget = ByteBudget(LIMIT, copies=2)
            for sent, *_ in scripts:
                assert await fetched(http, url, budget) == plain(sent)

    run(main)


def test_a_buffer_is_used_again_unless_something_refers_to_it() -> None:
    bodies = [bytes([number]) * MEGABYTE for number in range(4)]

    async def main() -> None:
        async with (
            serving(lambda number: (response(bodies[number]), [], False)) as (url, _),
            open_http(Engine()) as http,
        ):
            budget, used, kept, heads = ByteBudget(LIMIT, copies=2), list[int](), list[Any](), list[bytes]()
            for number in range(4):
                with budget.reservation() as reservation:
                    async with http.post(url, data=b"{}") as answer:
                        chunks = await receive(answer, reservation, budget)
                    assert isinstance(chunks[0], bytearray)
                    used.append(id(chunks[0]))
                    heads.append(head_of(chunks))
                    if number == 1:
                        kept.append(memoryview(chunks[0]))
                    assert bytes(joined(chunks)) == bodies[number]
                assert budget.buffers.kept_bytes <= 2 * MEGABYTE
            assert used[0] == used[1] != used[2] == used[3]
            assert bytes(kept[0]) == bodies[1]
            assert heads == [body[: transport.CHECKED_BYTES] for body in bodies]

    run(main)


def contexts(directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of a server and of its clients."""
    made = Authority(directory / "tls")
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(made.certificate, made.key)
    return server, ssl.create_default_context(cafile=made.ca)


@pytest.mark.parametrize("run", [run, lambda main: asyncio.run(main())], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize("encrypted", [False, True])
def test_both_loops_receive_into_buffers_with_and_without_tls(
    tmp_path: Path, run: Callable[[Callable[[], Any]], None], encrypted: bool
) -> None:
    server_tls, client_tls = contexts(tmp_path) if encrypted else (None, None)
    body = body_of(MEGABYTE)

    async def main() -> None:
        async with (
            serving(lambda number: (response(body), [number * 100 + 60], False), server_tls) as (url, peers),
            open_http(Engine()) as http,
        ):
            budget = ByteBudget(LIMIT)
            for _ in range(3):
                with budget.reservation() as reservation:
                    async with http.post(url, data=b"{}", ssl=client_tls or True) as answer:
                        chunks = await receive(answer, reservation, budget)
                    assert isinstance(chunks[0], bytearray)
                    assert joined(chunks) == body
            assert len(set(peers)) == 1

    run(main)


@settings(max_examples=200)
@given(sizes=st.lists(st.integers(1, 1 << 16), min_size=1, max_size=20))
def test_buffers_have_the_size_that_was_asked_for_and_stay_within_their_limit(sizes: list[int]) -> None:
    class Holder:
        buffer: bytearray | None = None

    buffers, holder, limit = Buffers(), Holder(), 1 << 17
    for size in sizes:
        holder.buffer = buffers.take(size, limit=limit)
        assert len(holder.buffer) == size
        buffers.give_back(holder, limit=limit)
        assert holder.buffer is None
        assert buffers.kept_bytes <= limit


def test_silence_within_a_body_ends_it() -> None:
    async def main() -> None:
        data = response(body_of(MEGABYTE))[: MEGABYTE // 2]
        async with (
            serving(lambda _: (data, [], False)) as (url, _),
            open_http(Engine(silence_s=0.1)) as http,
        ):
            budget = ByteBudget(LIMIT)
            with pytest.raises(aiohttp.SocketTimeoutError), budget.reservation() as reservation:
                async with http.post(url, data=b"{}") as answer:
                    await receive(answer, reservation, budget)
            assert budget.used == 0

    run(main)


def test_a_cancelled_body_closes_its_connection_and_leaves_the_budget() -> None:
    async def main() -> None:
        data = response(body_of(MEGABYTE))[: MEGABYTE // 2]
        async with serving(lambda _: (data, [], False)) as (url, _), open_http(Engine()) as http:
            budget = ByteBudget(LIMIT)
            receiving = asyncio.create_task(fetched(http, url, budget))
            while not budget.used:
                await asyncio.sleep(0)
            receiving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await receiving
            assert budget.used == 0
            assert isinstance(http.connector, transport.IdleConnector)
            assert not http.connector._acquired
            assert not http.connector._conns

    run(main)


def test_a_request_is_not_sent_behind_bytes_that_were_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They arrive between the look at the connection and the first byte of the request."""
    data, writers, received = response(body_of(60)), list[asyncio.StreamWriter](), list[bytes]()

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while True:
                received.append(await reader.readuntil(b"\r\n\r\n{}"))
                writer.write(data)

    def send_unasked(*args: Any) -> None:
        attach(*args)
        if len(received) == 1:
            writers[0].write(response(b"of another session"))

    attach = transport.attach
    monkeypatch.setattr(transport, "attach", send_unasked)

    async def main() -> None:
        async with await asyncio.start_server(respond, "127.0.0.1", 0) as server, open_http(Engine()) as http:
            url, budget = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", ByteBudget(LIMIT)
            assert await fetched(http, url, budget) == body_of(60)
            assert await fetched(http, url, budget) is None
            assert len(received) == 1
            received.clear()
            assert await fetched(http, url, budget) == body_of(60)

    run(main)


ODD = {
    "http 1.0": b"HTTP/1.0 200 OK\r\nContent-Length: 60\r\n\r\n" + BODY,
    "http 1.0, keep-alive": b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 60\r\n\r\n" + BODY,
    "close": OK + b"Connection: close\r\nContent-Length: 60\r\n\r\n" + BODY,
    "length twice": OK + b"Content-Length: 60\r\nContent-Length: 60\r\n\r\n" + BODY,
    "two lengths": OK + b"Content-Length: 60\r\nContent-Length: 59\r\n\r\n" + BODY,
    "list of lengths": OK + b"Content-Length: 60, 60\r\n\r\n" + BODY,
    "negative length": OK + b"Content-Length: -60\r\n\r\n" + BODY,
    "signed length": OK + b"Content-Length: +60\r\n\r\n" + BODY,
    "length too large": OK + b"Content-Length: 61\r\n\r\n" + BODY,
    "length too small": OK + b"Content-Length: 59\r\n\r\n" + BODY,
    "no bytes": OK + b"Content-Length: 0\r\n\r\n",
    "chunks and length": OK
    + b"Transfer-Encoding: chunked\r\nContent-Length: 60\r\n\r\n3c\r\n"
    + BODY
    + b"\r\n0\r\n\r\n",
    "length and identity": OK + b"Transfer-Encoding: identity\r\nContent-Length: 60\r\n\r\n" + BODY,
    "trailers": OK + b"Transfer-Encoding: chunked\r\n\r\n3c\r\n" + BODY + b"\r\n0\r\nDigest: 1\r\n\r\n",
    "continue": b"HTTP/1.1 100 Continue\r\n\r\n" + response(BODY),
    "204 with a length": b"HTTP/1.1 204 No Content\r\nContent-Length: 60\r\n\r\n",
    "304 with a length": b"HTTP/1.1 304 Not Modified\r\nContent-Length: 60\r\n\r\n",
    "500": b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 60\r\n\r\n" + BODY,
    "lines end with LF": b"HTTP/1.1 200 OK\nContent-Length: 60\n\n" + BODY,
    "compressed to a thousandth": response(bytes(1 << 22), encoding="gzip"),
}


async def parsed(data: bytes) -> set[bytes | None]:
    """What aiohttp's parser alone makes of a response, byte by byte. Behind its end, other bytes may refuse it."""
    loop, payload = asyncio.get_running_loop(), None
    parser = HttpResponseParser(BaseProtocol(loop), loop, 1 << 16, read_until_eof=True)
    try:
        for at in range(len(data)):
            if messages := parser.feed_data(data[at : at + 1])[0]:
                payload = messages[0][1]
            if payload is not None and payload.is_eof():
                return {payload.read_nowait(-1), *([None] if at + 1 < len(data) else [])}
        parser.feed_eof()
    except HttpProcessingError:
        return {None}
    return {payload.read_nowait(-1) if payload is not None and payload.is_eof() else None}


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_every_changed_byte_of_heads_and_chunk_sizes_is_read_or_refused_as_by_the_parser_alone(framing: str) -> None:
    good = OK + response(BODY[:20], chunks=[9], framing=framing).partition(TYPE)[2]
    cases = [
        good[:at] + bytes([byte]) + good[at + 1 :]
        for at in range(len(good))
        for byte in b"\r\n 02fx:,;"
        if good[at] != byte
    ]
    sent = [good]

    async def main() -> None:
        async with (
            serving(lambda number: (sent[0], [number % len(good)], True)) as (url, _),
            open_http(Engine()) as http,
            asyncio.timeout(60),  # a wrong chunk once left the reader waiting
        ):
            budget, accepted = ByteBudget(LIMIT), 0
            for data in cases:
                sent[0] = data
                received = await fetched(http, url, budget, once=True)
                assert received in await parsed(data), data
                accepted += received is not None
            assert 0.1 < accepted / len(cases) < 0.9

    run(main)


@pytest.mark.parametrize("data", ODD.values(), ids=ODD)
def test_odd_responses_are_read_as_by_aiohttp_alone(data: bytes) -> None:
    async def alone(http: aiohttp.ClientSession, url: str) -> bytes | None:
        try:
            async with http.post(url, data=b"{}") as answer:
                return await answer.read()
        except aiohttp.ClientError:
            return None

    async def main() -> None:
        for splits in ([], [30], [40, 90], [len(data) - 1]):
            async with (
                serving(lambda _, at=splits: (data, at, True)) as (url, _),
                open_http(Engine()) as http,
                aiohttp.ClientSession() as plain_http,
            ):
                assert await fetched(http, url, ByteBudget(LIMIT)) == await alone(plain_http, url)

    run(main)


@pytest.mark.parametrize(
    "extra",
    [b"x", OK, response(b"of another session"), response(body_of(MEGABYTE))],
    ids=["byte", "line", "short", "long"],
)
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("encrypted", [False, True])
def test_bytes_behind_a_body_end_its_connection(tmp_path: Path, encrypted: bool, later: bool, extra: bytes) -> None:
    server_tls, client_tls = contexts(tmp_path) if encrypted else (None, None)
    bodies = [body_of(MEGABYTE), bytes(MEGABYTE)]
    first = response(bodies[0])

    def script(number: int) -> tuple[bytes, list[int], bool]:
        return (
            (first + extra, [len(first)] if later else [], False) if number == 0 else (response(bodies[1]), [], False)
        )

    async def main() -> None:
        async with serving(script, server_tls) as (url, peers), open_http(Engine()) as http:
            budget = ByteBudget(LIMIT)
            assert await fetched(http, url, budget, client_tls) == bodies[0]
            for _ in range(20 if later else 0):  # idle meanwhile
                await asyncio.sleep(0)
            assert await fetched(http, url, budget, client_tls) == bodies[1]
            assert await fetched(http, url, budget, client_tls) == bodies[1]
            assert peers[0] != peers[1] == peers[2]

    run(main)


TICKET_TRIES = 20
"""connections: the event loop may read a connection's tickets before a receiver is attached"""


def test_session_tickets_of_tls_are_not_taken_for_a_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Authority(tmp_path / "tls")
    client_tls, seen = ssl.create_default_context(cafile=made.ca), list[bool]()

    def await_tickets(connection: Any, *args: Any) -> None:
        attach(connection, *args)
        readable = select.poll()
        readable.register(connection.transport.get_extra_info("socket").fileno(), select.POLLIN)
        seen.append(bool(readable.poll(1000)))

    attach = transport.attach
    monkeypatch.setattr(transport, "attach", await_tickets)

    async def main() -> None:
        async with serving(lambda _: (response(BODY), [], False)) as (url, _), open_http(Engine()) as http:
            with tls_port(int(url.rstrip("/").rpartition(":")[2]), made) as port:
                assert await fetched(http, f"https://127.0.0.1:{port}/", ByteBudget(LIMIT), client_tls) == BODY

    while not any(seen) and len(seen) < TICKET_TRIES:
        asyncio.run(main())
    assert any(seen), "no ticket came after a receiver was attached"

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import orjson
import pytest
from support.engine_clients import assert_idle, quick_engine, run
from support.engine_responses import request_info
from support.upstream import ReceivedRequest, Respond, Response, Server, answer, serving, user
from support.waiting import wait_until_async

from headpond.engines.dialects import load_dialect
from headpond.engines.http import transport
from headpond.engines.http.client import ON_LOOP_BYTES, EngineClient, Request
from headpond.engines.http.transport import NAME_HEADER
from headpond.engines.replicas import control
from headpond.engines.replicas.selection import Orders
from headpond.engines.responses.response import read_turn
from headpond.errors import EngineUnreachable, InfrastructureFailure, PolicyFailure, Upstream
from headpond.event_loop.offload import cores
from headpond.turn import SaidVersion, Turn

MEGABYTE = 1 << 20
CHAT = request_info()
REQUEST = Request(
    dialect=CHAT.dialect, body=orjson.dumps({"messages": [user("hello")]}), headers={"X-Session-ID": "r1.1"}
)


@contextlib.asynccontextmanager
async def client_of(*urls: str, **changes: Any) -> AsyncIterator[EngineClient]:
    """A client that holds nothing at the end."""
    async with EngineClient.open(quick_engine(*urls, **changes)) as client:
        yield client
        assert_idle(client)


def read_chat(body: bytes) -> Turn:
    return read_turn(body, request=CHAT)


def hello(request: ReceivedRequest) -> Response:
    return Response(body=answer(request, "hello"))


def failing(times: int, fault: Response) -> Callable[[ReceivedRequest], Response]:
    return lambda request: fault if request.retry < times else hello(request)


@contextlib.contextmanager
def refusing() -> Iterator[str]:
    """The URL of a port on which nothing listens. It is taken, so that no other process can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def content_of(body: bytes) -> bytes:
    return orjson.dumps(orjson.loads(body)["choices"][0]["message"]["content"])


FAULTS = {
    "a 500": Response(status=500, body=b"oops"),
    "a 503 in chunks": Response(status=503, body=b"busy", chunked=True),
    "too many requests": Response(status=429, body=b"later"),
    "no JSON": Response(body=b"<html>"),
    "no choices": Response(body=b'{"choices":[]}'),
    "half a body": Response(body=b'{"choices":[' * 10, breaks_off_at=30),
    "half a chunked body": Response(body=b'{"choices":[' * 10, breaks_off_at=30, chunked=True),
    "a broken connection": Response(breaks_off_at=-1),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_failed_request_is_retried(fault: Response) -> None:
    async def main() -> None:
        with serving(failing(2, fault)) as server:
            async with client_of(server.url) as client:
                response = await client.send(REQUEST, read_chat)
                assert bytes(response.value.completion_ids.tolist()) == b"hello"
                assert response.failures == 2
                assert [request.retry for request in server.received] == [0, 1, 2]

    run(main)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_request_that_keeps_failing_is_an_infrastructure_failure(fault: Response) -> None:
    async def main() -> None:
        with serving(lambda _: fault) as server:
            async with client_of(server.url, retries=2) as client:
                with pytest.raises(InfrastructureFailure, match="failed 3 times at one request") as failure:
                    await client.send(REQUEST, read_chat)
                assert not isinstance(failure.value, EngineUnreachable)
                assert len(server.received) == 3

    run(main)


def test_a_silent_engine_is_a_failure() -> None:
    async def main() -> None:
        with serving(failing(1, Response(hangs=True))) as server:
            async with client_of(server.url, silence_s=0.2, retries=100) as client:
                assert (await client.send(REQUEST, content_of)).failures >= 1
                await wait_until_async(lambda: not server.answering)

    run(main)


def test_an_engine_without_a_listener_is_unreachable() -> None:
    async def main() -> None:
        with refusing() as one, refusing() as other:
            async with client_of(one, other, retries=0) as client:
                with pytest.raises(EngineUnreachable, match=r"0\.1 s.*engine\.urls"):
                    await client.send(REQUEST, content_of)
                assert client.replicas.all_avoided

    run(main)


def test_connections_that_are_not_accepted_time_out() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as waiting:
            for _ in range(4):
                connection = waiting.enter_context(socket.socket())
                connection.setblocking(False)
                connection.connect_ex(full.getsockname())
            url = f"http://127.0.0.1:{full.getsockname()[1]}"
            async with client_of(url, connect_timeout_s=0.05) as client:
                with pytest.raises(EngineUnreachable, match="Timeout"):
                    await client.send(REQUEST, content_of)

    run(main)


def test_an_engine_that_restarts_in_time_costs_no_failure() -> None:
    async def main() -> None:
        with serving(hello) as server:
            server.stop()
            async with client_of(server.url, unreachable_s=30, retries=0) as client:
                sending = asyncio.create_task(client.send(REQUEST, content_of))
                await wait_until_async(lambda: client.replicas.all_avoided)
                server.start()
                assert (await sending).failures == 0

    run(main)


def test_an_engine_killed_during_a_response_is_waited_for() -> None:
    async def main() -> None:
        with serving(failing(1, Response(hangs=True))) as server:
            async with client_of(server.url, unreachable_s=30, retries=1) as client:
                sending = asyncio.create_task(client.send(REQUEST, content_of))
                await wait_until_async(lambda: server.answering)
                server.stop()
                await wait_until_async(lambda: client.replicas.all_avoided)
                server.start()
                assert (await sending).failures == 1

    run(main)


def test_another_replica_is_used_if_one_is_unreachable_or_fails() -> None:
    async def main() -> None:
        with serving(hello) as good, serving(lambda _: FAULTS["a 500"]) as bad, refusing() as away:
            async with client_of(away, bad.url, good.url) as client:
                first = await client.send(REQUEST, content_of)
                assert first.replica.url == good.url
                for _ in range(5):
                    assert (await client.send(REQUEST, content_of, preferred=first.replica)).replica is first.replica
                assert len(bad.received) == 1

    run(main)


def test_an_absent_endpoint_of_generate_is_named_with_its_flag() -> None:
    async def main() -> None:
        with serving(lambda _: Response(status=404, body=b'{"detail":"Not Found"}')) as server:
            async with client_of(server.url, dialect="generate") as client:
                request = replace(REQUEST, dialect=load_dialect("generate")(client.settings))
                with pytest.raises(InfrastructureFailure, match="--enable-scale-out"):
                    await client.send(request, content_of)

    run(main)


@pytest.mark.parametrize(
    ("refusal", "failure", "message"),
    [
        (Response(status=404, body=b"no such model"), InfrastructureFailure, "404: no such model.*engine.model"),
        (Response(status=307), InfrastructureFailure, "307"),
        (Response(status=400, body=b"This model's maximum context length is 8 tokens"), PolicyFailure, "context limit"),
        (Response(status=400, body=b'{"code":"context_length_exceeded"}'), PolicyFailure, "context limit"),
        (Response(status=400, body=b"The decoder prompt (length 9) is longer than the maximum model length of 8"),
         PolicyFailure, "context limit"),
    ],
)  # fmt: skip
def test_a_refused_request_is_not_retried(refusal: Response, failure: type[Exception], message: str) -> None:
    async def main() -> None:
        with serving(lambda _: refusal) as server:
            async with client_of(server.url) as client:
                with pytest.raises(failure, match=message):
                    await client.send(REQUEST, content_of)
                assert len(server.received) == 1

    run(main)


def test_a_version_is_what_the_replica_says_before_and_after() -> None:
    async def main() -> None:
        with serving(hello) as server:
            server.weights = "4"
            async with client_of(server.url) as client:

                def read_late(body: bytes) -> bytes:
                    server.weights = "5"
                    return content_of(body)

                response = await client.send(REQUEST, read_late)
                assert response.version == SaidVersion(4, exact=True)
                assert response.answered_at is not None
                after = await client.replicas.after(server.url, 4, response.answered_at)
                assert after == SaidVersion(5, exact=True)

    run(main)


def test_a_replica_that_restarted_between_two_polls_is_asked_before_its_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the process before it said does not hold: it has the weights that it was started with."""
    monkeypatch.setattr(control, "POLL_S", 600.0)

    async def main() -> None:
        with serving(hello) as server:
            server.weights = "4"
            async with client_of(server.url) as client:
                assert (await client.send(REQUEST, content_of)).version == SaidVersion(4, exact=True)
                server.stop()
                server.weights = "default"
                server.start()
                assert (await client.send(REQUEST, content_of)).version.version == 0
                server.stop()
                server.weights = "4"
                server.start()
                client.replicas.follow(Orders(run="r", sequence=1, version=4))
                assert (await client.send(REQUEST, content_of)).version == SaidVersion(4, exact=True)
                server.stop()
                server.weights = "default"
                server.start()
                asked = len(server.received)
                with pytest.raises(EngineUnreachable, match=r"version 4 to 'default'.*restarted"):
                    await client.send(REQUEST, content_of)
                assert len(server.received) == asked

    run(main)


def test_nothing_is_known_of_a_replica_that_is_gone() -> None:
    async def main() -> None:
        with serving(hello) as server:
            server.weights = "4"
            async with client_of(server.url) as client:
                response = await client.send(REQUEST, content_of)
                server.stop()
                assert response.answered_at is not None
                assert await client.replicas.after(server.url, 4, response.answered_at) in (
                    None,
                    SaidVersion(4, exact=True),  # a poll was under way
                )
                assert await client.replicas.after(server.url, 4, time.monotonic()) is None

    run(main)


def test_a_newer_version_of_a_job_is_asked_for_before_the_request() -> None:
    """The run submits jobs of version 5 once its replicas say so: the worker's own last poll may be older."""

    async def main() -> None:
        with serving(hello) as server:
            server.weights = "4"
            async with client_of(server.url) as client:
                client.replicas.follow(Orders(run="r", sequence=1, version=4))
                assert (await client.send(REQUEST, content_of)).version == SaidVersion(4, exact=True)
                server.weights = "5"
                client.replicas.follow(Orders(run="r", sequence=2, version=5, least_version=5))
                assert (await client.send(REQUEST, content_of)).version == SaidVersion(5, exact=True)

    run(main)


def test_a_request_that_waits_for_a_poll_counts_as_in_flight() -> None:
    """Otherwise a burst of first requests goes to the replica whose poll is answered later."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with client_of(f"http://127.0.0.1:{silent.getsockname()[1]}") as client:
                sending = asyncio.create_task(client.send(REQUEST, content_of))
                await asyncio.sleep(0)
                assert client.replicas.all[0].in_flight == 1
                sending.cancel()
                await asyncio.wait([sending])

    run(main)


def test_no_request_goes_to_a_replica_without_the_weights_of_the_run() -> None:
    async def main() -> None:
        with serving(hello) as behind, serving(hello) as current:
            behind.weights, current.weights = "default", "7"
            orders = Orders(run="r", sequence=1, version=7, least_version=7)
            async with client_of(behind.url, current.url) as client:
                client.replicas.follow(orders)
                for _ in range(4):
                    assert (await client.send(REQUEST, content_of)).replica.url == current.url
            assert behind.received == []
            async with client_of(behind.url) as client:
                client.replicas.follow(orders)
                with pytest.raises(EngineUnreachable, match="'default', older than version 7"):
                    await client.send(REQUEST, content_of)
            assert behind.received == []

    run(main)


def test_large_bodies_are_read_off_the_loop_and_small_ones_on_it() -> None:
    async def main() -> None:
        sizes = {True: 1, False: ON_LOOP_BYTES}
        for on_loop, size in sizes.items():
            with serving(
                lambda request, size=size: Response(body=answer(request, "hello", padding="x" * size))
            ) as server:
                async with client_of(server.url) as client:
                    response = await client.send(REQUEST, lambda _: threading.current_thread())
                    assert (response.value is threading.current_thread()) == on_loop

    run(main)


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_over_the_byte_budget_wait_unread(chunked: bool) -> None:
    """Four of twelve bodies fit, with room for their copies. They are held until the other eight responses wait; of
    those, only what fits into socket buffers has left the server."""
    size, fit, requests = 16 * MEGABYTE, 4, 12
    overhead = (
        min(fit, cores()) * size + requests * transport.BUFFERED_BYTES + int(transport.FRAGMENTATION * fit * size)
    )
    limit = fit * size + overhead
    body, release = b"x" * size, threading.Event()

    def read(received: bytes) -> int:
        assert release.wait(60)
        return len(received)

    async def main(server: Server) -> None:
        async with client_of(server.url, received_bytes=limit) as client:
            sending = [asyncio.create_task(client.send(REQUEST, read)) for _ in range(requests)]
            if not chunked:
                await wait_until_async(lambda: client.budget.waiting == requests - fit)
                assert client.budget.used == fit * size
                await wait_until_async(lambda: server.answering == requests - fit)
                assert server.unread_bytes < (requests - fit) * size / 2
            release.set()
            assert [response.value for response in await asyncio.gather(*sending)] == [size] * requests
            assert client.budget.most_used <= (limit + size if chunked else fit * size)

    with serving(lambda _: Response(body=body, chunked=chunked)) as server:
        run(lambda: main(server))


def test_a_response_larger_than_the_budget_is_refused() -> None:
    async def main() -> None:
        for chunked in (False, True):
            with serving(lambda _, chunked=chunked: Response(body=bytes(MEGABYTE), chunked=chunked)) as server:
                async with client_of(server.url, received_bytes=MEGABYTE // 2) as client:
                    with pytest.raises(InfrastructureFailure, match=r"raise engine\.received_bytes"):
                        await client.send(REQUEST, content_of)

    run(main)


@pytest.mark.parametrize(("patience_s", "connections"), [(0.0, 2), (3600.0, 1)])
def test_a_connection_that_was_read_slowly_is_not_reused(
    monkeypatch: pytest.MonkeyPatch, patience_s: float, connections: int
) -> None:
    """The server counts its keep-alive from when it sent the last byte, so the connection may be about to close."""
    monkeypatch.setattr(transport, "SLOW_READ_S", patience_s)

    async def main() -> None:
        with serving(named(bytes(MEGABYTE))) as server:
            async with client_of(server.url) as client:
                await client.send(REQUEST, len)  # over a connection of its own: names are not yet known
                for _ in range(2):
                    assert (await client.send(REQUEST, len)).value > MEGABYTE
            assert len({request.headers["peer"] for request in server.received[1:]}) == connections

    run(main)


def test_connections_are_bounded_and_reused() -> None:
    async def main() -> None:
        with serving(hello) as server:
            async with client_of(server.url, connections=3) as client:
                await client.send(REQUEST, content_of)
                await asyncio.gather(*(client.send(REQUEST, content_of) for _ in range(20)))
            assert server.most_answering <= 3
            assert len({request.headers["peer"] for request in server.received}) <= 4

    run(main)


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "generate"])
def test_a_request_is_named_in_every_dialect(dialect: str) -> None:
    body = orjson.dumps({"rid": "of the caller", "messages": [user("hello")]})
    request = Request(dialect=request_info(dialect).dialect, body=body, headers={"x-request-id": "of the caller"})

    async def main() -> None:
        with serving(lambda request: Response(body=answer(request, "hello", dialect=dialect))) as server:
            async with client_of(server.url) as client:
                for _ in range(3):
                    await client.send(request, bytes)
            first, *reused = [request.headers["peer"] for request in server.received]
        assert len({first, *reused}) == 2, "only the first has a connection of its own"

    run(main)


def test_connections_to_a_server_that_names_no_requests_are_used_once() -> None:
    async def main() -> None:
        with serving(lambda _: Response(body=b"{}")) as server:
            async with client_of(server.url, connections=3) as client:
                await asyncio.gather(*(client.send(REQUEST, bytes) for _ in range(10)))
            assert len({request.headers["peer"] for request in server.received}) == 10
            assert server.most_answering <= 3

    run(main)


def test_a_response_that_does_not_name_its_request_is_refused_by_a_client_that_knows_names() -> None:
    """After that, a server that names none is accepted, over connections of their own: it may have been replaced."""

    async def main() -> None:
        with serving(named(b"")) as server:
            async with client_of(server.url) as client:
                await client.send(REQUEST, bytes)
                server.respond = lambda _: Response(body=b"{}")
                response = await client.send(REQUEST, bytes)
        assert (response.value, response.failures) == (b"{}", 1)

    run(main)


def named(rest: bytes) -> Respond:
    return lambda request: Response(body=request.headers[NAME_HEADER].encode() + rest)


def test_a_large_request_arrives_complete() -> None:
    async def main() -> None:
        text = "y" * (MEGABYTE)
        large = Request(dialect=CHAT.dialect, body=orjson.dumps({"messages": [user(text)]}), headers={})
        with serving(failing(1, FAULTS["a 500"])) as server:
            async with client_of(server.url) as client:
                await client.send(large, content_of)
            assert [request.messages[0]["content"] == text for request in server.received] == [True, True]

    run(main)


def test_the_api_key_is_sent_as_a_bearer_token() -> None:
    async def main() -> None:
        with serving(hello) as server:
            async with client_of(server.url, api_key="hush") as client:
                await client.send(REQUEST, content_of)
            assert server.received[0].headers["Authorization"] == "Bearer hush"

    run(main)


def test_an_error_of_read_releases_connection_and_budget() -> None:
    async def main() -> None:
        def read(_: bytes) -> None:
            raise Upstream("not good enough")

        with serving(hello) as server:
            async with client_of(server.url, retries=1) as client:
                with pytest.raises(InfrastructureFailure, match="not good enough"):
                    await client.send(REQUEST, read)

    run(main)


def test_requests_go_to_the_replica_that_says_it_is_less_busy() -> None:
    """Requests of other processes are known from the engine's own metrics only."""

    async def main() -> None:
        with serving(hello) as busy, serving(hello) as idle:
            busy.metrics = "vllm:num_requests_running 8\nvllm:num_requests_waiting 4\n"
            idle.metrics = "vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"
            async with client_of(busy.url, idle.url) as client:
                await wait_until_async(lambda: all(replica.load for replica in client.replicas.all))
                for _ in range(6):
                    await client.send(REQUEST, read_chat)
            assert (len(busy.received), len(idle.received)) == (0, 6)

    run(main)

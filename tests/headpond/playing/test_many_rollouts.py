import asyncio
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest
import xxhash
from support.cancellation import cancelled_at
from support.engine_clients import assert_idle, attempt_of, files, loaded, run, stage_of
from support.upstream import ReceivedRequest, Response, answer, calling, serving, tool_call, user
from support.waiting import wait_until_async

from headpond.config.engine import EnvironmentSettings
from headpond.environments import load_environments
from headpond.playing.rollout import play


class TwoTurns:
    async def rollout(self, example: Any, policy: Any) -> float:
        completion = await policy.chat([user("first")])
        await policy.chat([user("first"), completion.message, user("second")])
        return 1.0


TWO_TURNS = loaded(TwoTurns())
SEALED = ["columns.safetensors", "experts.safetensors"]


def large_and_routed(request: ReceivedRequest) -> Response:
    """Large enough to be read off the loop. The first attempt fails, so that the retry pause is awaited as well."""
    if request.retry == 0 and len(request.messages) > 1:
        return Response(status=500)
    return Response(body=answer(request, "hello", routed=True, padding="x" * 300_000))


def test_a_rollout_cancelled_at_any_await_leaves_nothing(tmp_path: Path) -> None:
    """The number of awaits depends on how the bytes arrive: it goes on until five rollouts have run to completion."""

    async def main() -> None:
        cancelled = completed = 0
        with serving(large_and_routed) as server:
            async with stage_of(tmp_path, server.url) as stage:
                while completed < 5:
                    number = 1 + cancelled + completed
                    playing = cancelled_at(number, play(stage, TWO_TURNS, 0, attempt_of(attempt=number)))
                    await asyncio.wait([playing])
                    assert files(tmp_path) == ([] if playing.cancelled() else SEALED)
                    assert_idle(stage.client)
                    assert not stage.client._http.connector._acquired
                    stage.store.sweep("rollouts", named=())
                    cancelled += playing.cancelled()
                    completed += not playing.cancelled()
                await wait_until_async(lambda: not server.answering)
        assert cancelled >= 5

    run(main)


def fault_of(request: ReceivedRequest) -> Response | None:
    """The first attempt of one request in five fails, with one of five faults."""
    body = {name: value for name, value in request.body.items() if name != "seed"}
    draw = xxhash.xxh3_64_intdigest(orjson.dumps([body, request.headers["X-Session-ID"]]), seed=1) % 25
    faults = [
        Response(status=500),
        Response(status=503, body=b"busy", chunked=True),
        Response(body=b"{"),
        Response(body=b'{"choices":[]}' * 9, breaks_off_at=40),
        Response(breaks_off_at=-1),
    ]
    return faults[draw] if request.retry == 0 and draw < len(faults) else None


def halving(request: ReceivedRequest) -> Response:
    """Plays `guess` with two boxes of 1 to 10, without a mistake."""
    if fault := fault_of(request):
        return fault
    ranges = {"A": (1, 10), "B": (1, 10)}
    guesses = [call for message in request.messages for call in message.get("tool_calls") or []]
    results = [message["content"] for message in request.messages if message["role"] == "tool"]
    for call, result in zip(guesses, results, strict=True):
        arguments = orjson.loads(call["function"]["arguments"])
        (low, high), number = ranges[arguments["box"]], arguments["number"]
        after = {"too low": (number + 1, high), "too high": (low, number - 1), "correct": (1, 0)}
        ranges[arguments["box"]] = after[result]
    left = {box: (low + high) // 2 for box, (low, high) in ranges.items() if low <= high}
    calls = [tool_call("guess", {"box": box, "number": number}, id=box) for box, number in left.items()]
    return Response(body=answer(request, calling(*calls) if calls else "DONE", routed=True))


def test_256_rollouts_at_once_share_a_client_and_leak_nothing(tmp_path: Path) -> None:
    rollouts, connections = 256, 32

    async def main() -> None:
        options = {"boxes": 2, "largest": 10, "size": rollouts}
        environment = load_environments({"g": EnvironmentSettings(use="guess", options=options)})["g"]
        with serving(halving) as one, serving(halving) as other:
            async with stage_of(tmp_path, one.url, other.url, connections=connections) as stage:
                tasks = [
                    asyncio.create_task(play(stage, environment, index, attempt_of(f"r{index}")))
                    for index in range(rollouts)
                ]
                await wait_until_async(lambda: any(task.done() for task in tasks))
                cancelled = [task for task in tasks[::16] if task.cancel()]
                await asyncio.wait(tasks)
                assert_idle(stage.client)
                assert not stage.client._http.connector._acquired
            results = [task.result() for task in tasks if task not in cancelled]
            await wait_until_async(lambda: not one.answering + other.answering)
        assert all(result.reward == 1.0 for result in results)
        assert sum(result.metrics["engine_failures"] for result in results) > 20
        assert all(task.cancelled() for task in cancelled)
        assert len(results) >= rollouts - rollouts // 16
        assert files(tmp_path) == sorted(SEALED * len(results))
        for server in (one, other):
            peers = {request.headers["peer"] for request in server.received}
            assert len(peers) < len(server.received) / 2

    run(main, concurrency=rollouts)


def test_rollouts_stay_on_their_replica(tmp_path: Path) -> None:
    """No response is sent before all requests have arrived, so both replicas have the same number in flight."""

    async def main() -> None:
        all_received = threading.Event()

        def respond(request: ReceivedRequest) -> Response:
            return Response(body=answer(request, "hello"), waits_for=all_received)

        with serving(respond) as one, serving(respond) as other:
            async with stage_of(tmp_path, one.url, other.url) as stage:
                rollouts = asyncio.gather(
                    *(play(stage, TWO_TURNS, 0, attempt_of(f"r{number}")) for number in range(20))
                )
                await wait_until_async(lambda: len(one.received) + len(other.received) == 20)
                all_received.set()
                await rollouts
        sessions = [{request.headers["X-Session-ID"] for request in server.received} for server in (one, other)]
        assert not sessions[0] & sessions[1]
        assert [len(ids) for ids in sessions] == [10, 10]

    run(main)


@pytest.mark.parametrize("connections", [1, 1000])
def test_results_do_not_depend_on_the_number_of_connections(tmp_path: Path, connections: int) -> None:
    async def main() -> None:
        with serving(lambda request: Response(body=answer(request, "hello"))) as server:
            async with stage_of(tmp_path, server.url, connections=connections) as stage:
                results = await asyncio.gather(
                    *(play(stage, TWO_TURNS, 0, attempt_of(f"r{number}")) for number in range(10))
                )
        assert [result.turns for result in results] == [2] * 10
        assert server.most_answering <= connections

    run(main)

"""The stand-in answers as Redis does, for every command that orchestrator and simulated workers send."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import OutOfMemoryError, ResponseError

from headpond.orchestrator import lock
from headpond.orchestrator.exchange.reply_stream import _entries
from headpond.processes.embedded_redis import EmbeddedRedis
from simulation.redis_stand_in import Client, Server

Command = Callable[[Any], Awaitable[Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


def stand_in() -> Client:
    return Client(Server(SimpleNamespace(now=100.0), Random(1)))  # pyright: ignore[reportArgumentType]


async def in_a_pipeline(client: Any) -> Any:
    async with client.pipeline(transaction=True) as pipe:
        pipe.hset("hash", mapping={"a": "1", "b": b"2"})
        pipe.expire("hash", 60)
        pipe.hgetall("hash")
        pipe.llen("list")
        pipe.lindex("list", -1)
        pipe.delete("nothing")
        return await pipe.execute()


async def found_keys(client: Any) -> Any:
    return sorted([key async for key in client.scan_iter(match="headpond:*", count=1000)])


async def scanned(client: Any) -> Any:
    await client.hset("large", mapping={str(number): number for number in range(1000)})
    found, cursor = dict[bytes, bytes](), None
    while cursor != 0:
        cursor, some = await client.hscan("large", cursor or 0, count=100)
        found |= some
    return found, await client.hscan("none", 0, count=100)


async def expires_soon(client: Any) -> Any:
    return 0 < await client.pttl("key") <= 60_000


HELD = ["eval", lock.HOLD, 1, "headpond:lock"]
COMMANDS: dict[str, list[list[Any] | Command]] = {
    "strings": [
        ["ping"], ["pttl", "key"], ["set", "key", "value", {"ex": 60}], expires_soon, ["exists", "key"],
        ["exists", "key", "none"], ["get", "key"], ["mget", ["key", "none"]], ["set", "key", b"again"],
        ["pttl", "key"], ["expire", "key", 5], ["expire", "none", 5], ["delete", "key", "none"], ["get", "key"],
        ["set", "headpond:a", "1"], ["set", "other", "1"], found_keys,
    ],
    "hashes": [
        ["hset", "hash", "field", "value"], ["hset", "hash", "field", "other"], ["hget", "hash", "field"],
        ["hset", "hash", {"mapping": {"a": 1, "field": b"x"}}], ["hgetall", "hash"], ["hkeys", "hash"],
        ["hget", "none", "field"], ["hgetall", "none"], ["hkeys", "none"], ["hdel", "hash", "a", "none"],
        ["hdel", "hash", "field"], ["exists", "hash"], ["hdel", "none", "a"], in_a_pipeline, ["hgetall", "hash"],
        scanned,
    ],
    "lists": [
        ["lpush", "list", b"1", b"2"], ["lpush", "list", b"3"], ["rpush", "list", b"0"], ["llen", "list"],
        ["lrange", "list", 0, -1], ["lrange", "list", 1, 2], ["lindex", "list", -1], ["lindex", "list", 0],
        ["lindex", "list", 9], ["lrem", "list", 0, b"2"],
        ["rpush", "long", *"abcdef"], ["ltrim", "long", 2, -1], ["lrange", "long", 0, -1], ["ltrim", "long", 0, -3],
        ["lrange", "long", 0, -1], ["ltrim", "long", 5, -1], ["exists", "long"], ["ltrim", "none", 1, -1],
        ["brpop", ["none", "list"], {"timeout": 1}],
        ["rpop", "list"], ["lrange", "list", 0, -1], ["rpop", "list"], ["rpop", "list"], ["exists", "list"],
        ["llen", "none"], ["lrange", "none", 0, -1], ["lindex", "none", -1], ["lrem", "none", 0, b"1"], in_a_pipeline,
    ],
    "the lock": [
        [*HELD, b"mine", 10, b""], [*HELD, b"mine", 10, b""], [*HELD, b"other", 10, b""], ["get", "headpond:lock"],
        ["eval", lock.RELEASE, 1, "headpond:lock", b"other"], ["get", "headpond:lock"],
        [*HELD, b"other", 10, b"mine"], ["get", "headpond:lock"],
        ["eval", lock.RELEASE, 1, "headpond:lock", b"other"], ["exists", "headpond:lock"],
    ],
}  # fmt: skip


async def results(client: Any, commands: list[list[Any] | Command]) -> list[Any]:
    found = []
    for command in commands:
        if callable(command):
            found.append(await command(client))
            continue
        name, *arguments = command
        options = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
        found.append(await getattr(client, name)(*arguments, **options))
    return found


def on_both(server: EmbeddedRedis, play: Command) -> tuple[Any, Any]:
    async def both() -> tuple[Any, Any]:
        real = redis.asyncio.Redis.from_url(server.url)
        try:
            await real.flushall()
            return await play(stand_in()), await play(real)
        finally:
            await real.aclose()

    return asyncio.run(both())


@pytest.mark.parametrize("commands", COMMANDS.values(), ids=COMMANDS)
def test_results_are_those_of_redis(server: EmbeddedRedis, commands: list[list[Any] | Command]) -> None:
    simulated, real = on_both(server, lambda client: results(client, commands))
    assert simulated == real


def test_a_stream_is_that_of_redis(server: EmbeddedRedis) -> None:
    async def play(client: Any) -> list[Any]:
        ids = [await client.xadd("stream", {"reply": content}) for content in (b"a", b"b", b"c")]
        read = [
            _entries(await client.xread({"stream": after}, count=2, block=10)) for after in ("0-0", ids[0].decode())
        ]
        nothing = _entries(await client.xread({"stream": ids[2].decode()}, count=2, block=10))
        missing = _entries(await client.xread({"none": "0-0"}, count=2, block=10))
        removed = await client.xtrim("stream", minid=ids[1].decode(), approximate=False)
        left = _entries(await client.xread({"stream": "0-0"}, count=9, block=10))
        info = (await client.xinfo_stream("stream"))["last-generated-id"]
        later = await client.xadd("stream", {"reply": b"d"})
        return _with_order_of_ids([*read, nothing, missing, removed, left, info, later], [*ids, later])

    simulated, real = on_both(server, play)
    assert simulated == real


def test_a_missing_stream_has_no_information(server: EmbeddedRedis) -> None:
    async def play(client: Any) -> str:
        with pytest.raises(ResponseError) as raised:
            await client.xinfo_stream("none")
        return str(raised.value)

    simulated, real = on_both(server, play)
    assert simulated == real


def _with_order_of_ids(value: Any, ids: list[bytes]) -> Any:
    """Each id replaced by its place among `ids`."""
    if isinstance(value, list | tuple):
        return [_with_order_of_ids(each, ids) for each in value]
    return ids.index(value) if value in ids else value


def test_a_full_redis_refuses_the_same_commands(server: EmbeddedRedis) -> None:
    growing: list[list[Any]] = [
        ["set", "a", "1"], ["hset", "b", "c", "1"], ["lpush", "d", "1"], ["rpush", "d", "1"],
        ["xadd", "e", {"f": "1"}, {}], [*HELD, b"mine", 10, b""],
    ]  # fmt: skip
    allowed: list[list[Any]] = [
        ["get", "a"], ["hdel", "b", "c"], ["lrem", "d", 0, "1"], ["delete", "a"], ["expire", "a", 1], ["rpop", "d"],
        ["eval", lock.RELEASE, 1, "headpond:lock", b"mine"],
    ]  # fmt: skip

    async def play(client: Any) -> list[bool]:
        if isinstance(client, Client):
            client._server.full_until = 1e9
        else:
            await client.config_set("maxmemory", 1)
        try:
            return [await refuses(client, command) for command in growing + allowed]
        finally:
            if not isinstance(client, Client):
                await client.config_set("maxmemory", 0)

    simulated, real = on_both(server, play)
    assert simulated == real == [True] * len(growing) + [False] * len(allowed)


async def refuses(client: Any, command: list[Any]) -> bool:
    try:
        await results(client, [command])
    except OutOfMemoryError:
        return True
    return False

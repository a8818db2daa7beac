"""A stand-in for Redis on the simulated clock: the commands that orchestrator and workers use, with faults.

`test_redis_stand_in.py` plays the same commands against it and a real server and compares the results.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from fnmatch import fnmatch
from random import Random
from typing import Any

import xxhash
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ResponseError

from headpond.orchestrator import lock
from simulation.loop import PROCESS, Killed, SimulatedLoop

GROWING = frozenset({"hset", "lpush", "rpush", "set", "xadd"})
"""commands that Redis refuses when it is out of memory"""
SCANNED = 5
"""fields that one HSCAN finds"""
Value = str | bytes | int | float
Command = tuple[str, tuple[Any, ...], dict[str, Any]]


class Stream:
    def __init__(self) -> None:
        self.entries: list[tuple[tuple[int, int], dict[bytes, bytes]]] = []
        self.last = (0, 0)


class Server:
    """The data, and what is wrong with it at present."""

    def __init__(self, loop: SimulatedLoop, delays: Random) -> None:
        self.loop = loop
        self.delays = delays
        self.data: dict[bytes, Any] = {}
        self._expires: dict[bytes, float] = {}
        self.clock_skew_s = 0.0
        self.away_until = 0.0
        self.silent_until = 0.0
        self.full_until = 0.0
        self.wakers: dict[bytes, list[asyncio.Event]] = defaultdict(list)
        """of clients that wait for a list or a stream"""

    @property
    def failed_until(self) -> float:
        """When its last outage ended or will end."""
        return max(self.away_until, self.silent_until)

    def flush(self) -> None:
        self.data.clear()
        self._expires.clear()

    def _wake(self, key: Value) -> None:
        for waker in self.wakers.get(encode(key), ()):
            waker.set()

    # the keyspace

    def find(self, key: Value, kind: type[Any] | None = None) -> Any:
        name = encode(key)
        if self._expires.get(name, float("inf")) <= self.loop.now:
            self.delete(name)
        if name not in self.data and kind is not None:
            self.data[name] = kind()
        return self.data.get(name)

    def exists(self, *keys: Value) -> int:
        return sum(self.find(key) is not None for key in keys)

    def delete(self, *keys: Value) -> int:
        removed = [self.data.pop(encode(key), None) is not None for key in keys]
        for key in keys:
            self._expires.pop(encode(key), None)
        return sum(removed)

    def _drop_if_empty(self, key: Value) -> None:
        if not self.find(key):
            self.delete(key)

    def expire(self, key: Value, seconds: int) -> bool:
        if self.find(key) is None:
            return False
        self._expires[encode(key)] = self.loop.now + seconds
        return True

    def pttl(self, key: Value) -> int:
        if self.find(key) is None:
            return -2
        at = self._expires.get(encode(key))
        return -1 if at is None else int(1000 * (at - self.loop.now))

    def ping(self) -> bool:
        return True

    def get(self, key: Value) -> bytes | None:
        return self.find(key)

    def mget(self, keys: list[Value]) -> list[bytes | None]:
        return [self.find(key) for key in keys]

    def set(self, key: Value, value: Value, ex: int | None = None) -> bool:
        self.delete(key)
        self.data[encode(key)] = encode(value)
        if ex is not None:
            self.expire(key, ex)
        return True

    def scan(self, match: str) -> list[bytes]:
        return [key for key in list(self.data) if fnmatch(key.decode(), match) and self.find(key) is not None]

    def eval(self, script: str, numkeys: int, key: str, *arguments: Any) -> bytes | None:
        """The two scripts of `orchestrator/lock.py`."""
        assert numkeys == 1
        value = encode(arguments[0])
        held = self.get(key)
        if script == lock.RELEASE:
            self.delete(*([key] if held == value else []))
            return None
        assert script == lock.HOLD
        if held is not None and held not in (value, encode(arguments[2])):
            return held
        self.set(key, value, ex=int(arguments[1]))
        return value

    # hashes

    def hset(
        self, key: Value, field: Value | None = None, value: Value | None = None, mapping: dict[Any, Any] | None = None
    ) -> int:
        fields: dict[bytes, bytes] = self.find(key, dict)
        given = {field: value} if field is not None else dict(mapping or {})
        new = {encode(name): encode(each) for name, each in given.items()}
        added = len(new.keys() - fields.keys())
        fields.update(new)
        return added

    def hget(self, key: Value, field: Value) -> bytes | None:
        return (self.find(key) or {}).get(encode(field))

    def hgetall(self, key: Value) -> dict[bytes, bytes]:
        return dict(self.find(key) or {})

    def hkeys(self, key: Value) -> list[bytes]:
        return list(self.find(key) or {})

    def hscan(self, key: Value, cursor: int = 0, count: int = 10) -> tuple[int, dict[bytes, bytes]]:
        """A few fields at a time, whatever `count` is: it is a hint. Fields that stay are found, others may be."""
        places = sorted((xxhash.xxh3_64_intdigest(field) + 1, field) for field in self.find(key) or {})
        left = [place for place in places if place[0] >= cursor]
        found = {field: self.find(key)[field] for _, field in left[:SCANNED]}
        return (left[SCANNED][0] if len(left) > SCANNED else 0), found

    def hdel(self, key: Value, *fields: Value) -> int:
        there = self.find(key) or {}
        removed = sum(there.pop(encode(field), None) is not None for field in fields)
        self._drop_if_empty(key)
        return removed

    # lists: the head is index 0

    def lpush(self, key: Value, *values: Value) -> int:
        items: list[bytes] = self.find(key, list)
        items[:0] = reversed([encode(value) for value in values])
        self._wake(key)
        return len(items)

    def rpush(self, key: Value, *values: Value) -> int:
        items: list[bytes] = self.find(key, list)
        items += [encode(value) for value in values]
        self._wake(key)
        return len(items)

    def rpop(self, key: Value) -> bytes | None:
        items = self.find(key)
        value = items.pop() if items else None
        self._drop_if_empty(key)
        return value

    def pop_first(self, keys: list[Value]) -> tuple[bytes, bytes] | None:
        """BRPOP that finds something."""
        found = next((key for key in keys if self.find(key)), None)
        return (encode(found), self.rpop(found) or b"") if found is not None else None

    def llen(self, key: Value) -> int:
        return len(self.find(key) or ())

    def lindex(self, key: Value, index: int) -> bytes | None:
        items = self.find(key) or []
        return items[index] if -len(items) <= index < len(items) else None

    def lrange(self, key: Value, first: int, last: int) -> list[bytes]:
        items = self.find(key) or []
        return list(items[first : None if last == -1 else last + 1])

    def ltrim(self, key: Value, first: int, last: int) -> bool:
        items = self.find(key) or []
        length = len(items)
        first, last = (max(0, index + length) if index < 0 else index for index in (first, last))
        items[:] = items[first : last + 1]
        self._drop_if_empty(key)
        return True

    def lrem(self, key: Value, count: int, value: Value) -> int:
        assert count == 0
        items = self.find(key) or []
        kept = [item for item in items if item != encode(value)]
        removed = len(items) - len(kept)
        items[:] = kept
        self._drop_if_empty(key)
        return removed

    # streams

    def xadd(self, key: Value, fields: dict[Any, Any]) -> bytes:
        stream: Stream = self.find(key, Stream)
        now = (int(1000 * (self.loop.now + self.clock_skew_s)), 0)
        stream.last = now if now > stream.last else (stream.last[0], stream.last[1] + 1)
        stream.entries.append((stream.last, {encode(name): encode(value) for name, value in fields.items()}))
        self._wake(key)
        return stream_id(stream.last)

    def read_stream(self, streams: dict[str, str], count: int) -> list[Any]:
        ((key, after),) = streams.items()
        stream = self.find(key)
        first = tuple(map(int, after.split("-")))
        entries = [(stream_id(id), fields) for id, fields in (stream.entries if stream else ()) if id > first]
        return [[encode(key), entries[:count]]] if entries else []

    def xtrim(self, key: Value, minid: str, approximate: bool) -> int:
        """Redis trims whole nodes of 100 entries if approximately: here now and then, and exactly."""
        stream = self.find(key)
        if stream is None or (approximate and self.delays.random() < 0.5):
            return 0
        first = tuple(map(int, minid.split("-")))
        kept = [entry for entry in stream.entries if entry[0] >= first]
        removed = len(stream.entries) - len(kept)
        stream.entries = kept
        return removed

    def xinfo_stream(self, key: Value) -> dict[str, Any]:
        if self.find(key) is None:
            raise ResponseError("no such key")
        return {"last-generated-id": stream_id(self.find(key).last)}


def encode(value: Value) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def stream_id(id: tuple[int, int]) -> bytes:
    return b"%d-%d" % id


class Client:
    """`redis.asyncio.Redis`, as far as it is used."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)

        async def command(*args: Any, **kwargs: Any) -> Any:
            return (await self._send([(name, args, kwargs)]))[0]

        return command

    async def aclose(self) -> None:
        pass

    def pipeline(self, transaction: bool = True) -> "Pipeline":
        return Pipeline(self)

    async def scan_iter(self, match: str, count: int = 10) -> AsyncIterator[bytes]:
        for key in (await self._send([("scan", (match,), {})]))[0]:
            yield key

    async def xread(self, streams: dict[str, str], count: int, block: int) -> list[Any]:
        return await self._until_found(("read_stream", (streams, count), {}), list(streams), block / 1000) or []

    async def brpop(self, keys: list[Value], timeout: float) -> tuple[bytes, bytes] | None:
        return await self._until_found(("pop_first", (keys,), {}), keys, timeout)

    async def _until_found(self, command: Command, keys: Sequence[Value], seconds: float) -> Any:
        """The result of a blocking command, None after `seconds`."""
        wakers, waker = [self._server.wakers[encode(key)] for key in keys], asyncio.Event()
        for each in wakers:
            each.append(waker)
        try:
            while not (found := (await self._send([command]))[0]):
                waker.clear()
                async with asyncio.timeout(seconds):
                    await waker.wait()
            return found
        except TimeoutError:
            return None
        finally:
            for each in wakers:
                each.remove(waker)

    async def _send(self, commands: list[Command]) -> list[Any]:
        """One request and its response. If the connection breaks between the two, the commands have been executed."""
        server, process = self._server, PROCESS.get()
        if process is not None and not process.alive:
            raise Killed
        await asyncio.sleep(_latency_s(server.delays))
        if server.loop.now < server.silent_until:
            await asyncio.sleep(server.silent_until - server.loop.now + 60)
        if server.loop.now < server.away_until:
            if server.delays.random() < 0.3:
                self._execute(commands)
            raise RedisConnectionError("Connection refused (simulated)")
        if server.loop.now < server.full_until and any(_grows(each) for each in commands):
            raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'. (simulated)")
        results = self._execute(commands)
        if server.delays.random() < 0.2:
            await asyncio.sleep(_latency_s(server.delays))
        return results

    def _execute(self, commands: list[Command]) -> list[Any]:
        return [getattr(self._server, name)(*args, **kwargs) for name, args, kwargs in commands]


def _grows(command: Command) -> bool:
    name, arguments, _ = command
    return name in GROWING or (name == "eval" and arguments[0] == lock.HOLD)


class Pipeline:
    """Transactions only: all commands at one moment, or none."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._commands: list[Command] = []

    async def __aenter__(self) -> "Pipeline":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._commands.append((name, args, kwargs))

    async def execute(self) -> list[Any]:
        return await self._client._send(self._commands)


def _latency_s(delays: Random) -> float:
    return delays.random() * (0.001 if delays.random() < 0.98 else 0.3)

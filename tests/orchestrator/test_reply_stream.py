import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.broker import Broker
from orchestrator.ledger.ledger import Ledger
from orchestrator.reply_stream import START, ReplyStream
from penstock import redis_keys
from penstock.messages import Outcome, Reply
from penstock.runtime.embedded_redis import EmbeddedRedis


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


class HeldBroker(Broker):
    """Holds back the results of commands while `holds` is set, until `let_go`."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.let_go = asyncio.Event()
        self.called = asyncio.Event()
        self.holds = False

    async def call(self, command: Callable[[Any], Awaitable[Any]]) -> Any:
        held = self.holds
        result = await super().call(command)
        if held:
            self.called.set()
            await self.let_go.wait()
        return result


class Scene:
    """A run's stream of replies, with a ledger and a connection to Redis."""

    def __init__(self, server: EmbeddedRedis, directory: Path) -> None:
        self.broker = HeldBroker(server.url)
        self.ledger = Ledger(directory / "ledger.sqlite")
        self.replies = ReplyStream(directory.name, self.broker, self.ledger)
        self.stream = redis_keys.replies(directory.name)
        self.run = directory.name

    async def add_reply(self, job: str) -> None:
        reply = Reply(run=self.run, job=job, attempt=1, execution="x", worker="w", outcome=Outcome.DONE)
        await self.broker.client.xadd(self.stream, {"reply": reply.model_dump_json()})

    async def read(self) -> list[str]:
        entries = await self.replies.read()
        return [reply.job for reply in map(self.replies.accept, entries) if reply]


def play(server: EmbeddedRedis, directory: Path, scene: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    @asynccontextmanager
    async def opened() -> Any:
        opened = Scene(server, directory)
        try:
            yield opened
        finally:
            await opened.broker.client.delete(opened.stream)
            opened.ledger.close()
            await opened.broker.close()

    async def run() -> None:
        async with opened() as it:
            await scene(it)

    asyncio.run(run())


def test_replies_are_read_once_and_in_order(server: EmbeddedRedis, tmp_path: Path) -> None:
    async def scene(it: Scene) -> None:
        await it.add_reply("a")
        await it.add_reply("b")
        assert await it.read() == ["a", "b"]
        await it.add_reply("c")
        assert await it.read() == ["c"]
        await it.replies.trim()
        assert await it.broker.client.xlen(it.stream) <= 3

    play(server, tmp_path, scene)


def test_an_entry_that_was_not_accepted_is_read_again(server: EmbeddedRedis, tmp_path: Path) -> None:
    async def scene(it: Scene) -> None:
        await it.add_reply("a")
        await it.add_reply("b")
        entries = await it.replies.read()
        assert len(entries) == 2
        it.replies.accept(entries[0])
        assert await it.read() == ["b"]

    play(server, tmp_path, scene)


def test_a_missing_stream_is_read_from_its_start(server: EmbeddedRedis, tmp_path: Path) -> None:
    async def scene(it: Scene) -> None:
        await it.add_reply("a")
        assert await it.read() == ["a"]
        await it.broker.client.delete(it.stream)
        assert await it.replies.newest() == START
        assert it.replies.position == START
        await it.add_reply("a")
        assert await it.read() == ["a"]

    play(server, tmp_path, scene)


def test_a_reply_that_arrives_during_newest_does_not_reset_the_stream(server: EmbeddedRedis, tmp_path: Path) -> None:
    async def scene(it: Scene) -> None:
        await it.add_reply("a")
        assert await it.read() == ["a"]
        it.broker.holds = True
        reading = asyncio.create_task(it.replies.newest())
        await it.broker.called.wait()
        it.broker.holds = False
        await it.add_reply("b")
        assert await it.read() == ["b"]
        it.broker.let_go.set()
        newest = await reading
        assert not it.replies.behind(newest)
        assert it.replies.position != START

    play(server, tmp_path, scene)


def test_unreadable_replies_and_those_of_other_runs_are_skipped(server: EmbeddedRedis, tmp_path: Path) -> None:
    async def scene(it: Scene) -> None:
        await it.broker.client.xadd(it.stream, {"reply": "no json"})
        await it.broker.client.xadd(it.stream, {"something": "else"})
        other = Reply(run="other", job="o", attempt=1, execution="x", worker="w", outcome=Outcome.DONE)
        await it.broker.client.xadd(it.stream, {"reply": other.model_dump_json()})
        await it.add_reply("a")
        assert await it.read() == ["a"]

    play(server, tmp_path, scene)


def test_deleting_the_stream_resets_the_position(server: EmbeddedRedis, tmp_path: Path) -> None:
    async def scene(it: Scene) -> None:
        await it.add_reply("a")
        await it.read()
        await it.replies.delete()
        assert it.replies.position == START
        assert await it.replies.newest() == START

    play(server, tmp_path, scene)

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.ledgers import configured, replies_of, reply_to, submitted
from support.stores import run_store

from headpond.batches import EncodedRank
from headpond.broker import redis_keys
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.orchestrator.exchange.reply_stream import START, ReplyStream
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.release import Releaser
from headpond.orchestrator.trainer import Trainer
from headpond.processes.embedded_redis import EmbeddedRedis
from headpond.records.rollout import RolloutResult
from headpond.store import BlobRef
from headpond.tasks.stages.encode import EncodeResult


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
        directory.mkdir(exist_ok=True)
        self.broker = HeldBroker(server.url)
        self.ledger = Ledger(directory / "ledger.sqlite")
        self.replies = ReplyStream(directory.name, self.broker, self.ledger)
        self.stream = redis_keys.replies(directory.name)
        self.run = directory.name

    async def add_reply(self, job: str) -> None:
        reply = reply_to(job, run=self.run)
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
        other = reply_to("o", run="other")
        await it.broker.client.xadd(it.stream, {"reply": other.model_dump_json()})
        await it.add_reply("a")
        assert await it.read() == ["a"]

    play(server, tmp_path, scene)


OWN = "rollouts/run/g0000000-0/1.x/"
MANIFEST = "batches/step_000000/manifest.json"


def rollout_of(columns: str, experts: str | None = None) -> RolloutResult:
    refs = [BlobRef(key=key, size=1, checksum="0") if key else None for key in (columns, experts)]
    return RolloutResult(reward=1.0, columns=refs[0], experts=refs[1])


def rank_of(file: str, jsonl: str | None = None, *, data_rank: int = 0) -> EncodeResult:
    refs = [BlobRef(key=key, size=1, checksum="0") for key in (file, jsonl) if key]
    rank = EncodedRank(plan="p", data_rank=data_rank, file=refs[0], rollouts_jsonl=refs[1] if jsonl else None,
                       micro_batches=1, tokens=1, samples=1, loss_tokens=1)  # fmt: skip
    return EncodeResult(rank=rank)


STEP = "batches/step_000000/"


@pytest.mark.parametrize(
    ("job", "result", "accepted"),
    [
        ("g0000000-0", rollout_of(OWN + "columns.safetensors", OWN + "experts.safetensors"), True),
        ("g0000000-0", RolloutResult(reward=1.0), True),
        ("g0000000-0", rollout_of(MANIFEST), False),
        ("g0000000-0", rollout_of(OWN + "columns.safetensors", MANIFEST), False),
        ("g0000000-0", rollout_of("rollouts/run/g0000000-1/1.x/columns.safetensors"), False),
        ("g0000000-0", rollout_of("rollouts/other/g0000000-0/1.x/columns.safetensors"), False),
        ("g0000000-0", rollout_of("rollouts/run/g0000000-0/2.y/columns.safetensors"), False),
        ("g0000000-0", rollout_of(OWN + "../../" + MANIFEST), False),
        ("g0000000-0", rollout_of(OWN), False),
        ("s000000f1r0", rank_of(STEP + "rank_00.x.safetensors", STEP + "rollouts.x.jsonl"), True),
        ("s000000f1r0", EncodeResult(unreadable=("g0000000-0",)), True),
        ("s000000f1r0", rank_of(MANIFEST), False),
        ("s000000f1r0", rank_of(STEP + "rank_00.x.safetensors", MANIFEST), False),
        ("s000000f1r0", rank_of(STEP + "rank_01.x.safetensors", data_rank=1), False),
        ("s000000f1r0", rank_of("batches/step_000001/rank_00.x.safetensors"), False),
        ("s000000f1r0", rank_of(STEP + "rank_00.y.safetensors"), False),
        ("g0000000-0", rank_of(STEP + "rank_00.x.safetensors"), False),
    ],
)
def test_a_reply_that_names_files_of_another_execution_is_refused(
    server: EmbeddedRedis, tmp_path: Path, job: str, result: RolloutResult | EncodeResult, accepted: bool
) -> None:
    """As a late reply it would delete them, as the first one it would deliver them."""

    async def scene(it: Scene) -> None:
        reply = reply_to(job, result=result)
        await it.broker.client.xadd(it.stream, {"reply": reply.model_dump_json()})
        assert await it.read() == ([job] if accepted else [])
        assert it.ledger.state.replies_refused == (not accepted)

    play(server, tmp_path / "run", scene)


def test_a_forged_late_reply_deletes_nothing(server: EmbeddedRedis, tmp_path: Path) -> None:
    """Neither a manifest nor the files that settled the rollout it names."""
    config = configured(run_dir=tmp_path / "run")
    config.run_dir.mkdir()
    store = run_store(config)

    async def scene(it: Scene) -> None:
        replies = replies_of(config, it.ledger)
        rollout = submitted(it.ledger).rollouts[0]
        own = f"rollouts/run/{rollout.id}/1.x/columns.safetensors"
        manifest, columns = store.put(MANIFEST, [b"{}"]), store.put(own, [b"tokens"])
        forged = [BlobRef(key=manifest.key, size=0, checksum=""), BlobRef(key=columns.key, size=99, checksum="")]
        for ref in (columns, *forged):
            result = RolloutResult(reward=1.0, columns=ref)
            reply = reply_to(rollout.id, result=result)
            await it.broker.client.xadd(it.stream, {"reply": reply.model_dump_json()})
        for entry in await it.replies.read():
            if accepted := it.replies.accept(entry):
                replies.apply(accepted)
        await it.ledger.committed()
        await Releaser(config, it.ledger, Trainer(config, it.ledger)).run_once()
        assert rollout.result
        assert rollout.result.columns == columns
        assert store.path(manifest.key).exists()
        assert store.path(columns.key).exists()
        assert (it.ledger.state.fenced, it.ledger.state.replies_refused) == (1, 1)

    play(server, tmp_path / "run", scene)


def test_deleting_the_stream_resets_the_position(server: EmbeddedRedis, tmp_path: Path) -> None:
    async def scene(it: Scene) -> None:
        await it.add_reply("a")
        await it.read()
        await it.replies.delete()
        assert it.replies.position == START
        assert await it.replies.newest() == START

    play(server, tmp_path, scene)

"""Who works for a run, over a real Redis; which failures count for a job; which replies are used."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from support.ledgers import configured, pipeline_of, reply_to, submitted
from support.waiting import Clock

from headpond.broker import redis_keys
from headpond.broker.queues import WorkerKind
from headpond.ledger.states import JobState, RolloutState
from headpond.orchestrator.exchange.gates import Gates
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import JobRecord
from headpond.orchestrator.replies import Replies
from headpond.orchestrator.workforce.attendance import (
    DECLINES_MOST,
    LISTED_MOST,
    PAUSE_MOST_S,
    SILENT_S,
    Attendance,
    leave,
)
from headpond.processes.embedded_redis import EmbeddedRedis
from headpond.records.rollout import RolloutResult
from headpond.store import BlobRef
from headpond.tasks.agreement import Order, Presence, digest, used_settings
from headpond.tasks.stage import Outcome

LEASE_S = 8.0
CONFIG = configured(recovery={"max_failures": 3, "lease_s": LEASE_S})
DIGEST = digest(used_settings(CONFIG, WorkerKind.ROLLOUTS))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis"), appendonly=False) as server:
        yield server.url


class Scene:
    """Workers are what the test says in Redis, as they do."""

    def __init__(self, url: str, ledger: Ledger) -> None:
        self.redis = redis.Redis.from_url(url)
        self.redis.flushdb()
        self.url = url
        self.ledger = ledger
        self.attendance = Attendance(CONFIG, Broker(url))
        self.gates = Gates()
        self.replies = Replies(CONFIG, ledger, pipeline_of(CONFIG, ledger, self.gates), self.attendance)
        self.group = submitted(ledger)
        self.beat = 0

    def job(self, number: int = 0) -> JobRecord:
        return self.ledger.jobs[self.group.rollouts[number].id]

    def announce(self, *nodes: str, settings: str = DIGEST, running: int = 1, **said: Any) -> None:
        self.beat += 1
        for node in nodes:
            presence = Presence(kind=WorkerKind.ROLLOUTS, settings=settings, beat=self.beat, running=running, **said)
            self.redis.hset(redis_keys.WORKERS, node, presence.model_dump_json())

    def exchange(self) -> list[str]:
        async def once() -> list[str]:
            self.attendance._broker = Broker(self.url)  # type: ignore[reportPrivateUsage]
            return await self.attendance.exchange()

        return asyncio.run(once())

    def reply(self, node: str, outcome: Outcome = Outcome.FAILED, *, number: int = 0, settings: str = DIGEST) -> None:
        job = self.job(number)
        if job.state is JobState.WAITING:
            self.ledger.submit(job)
        result = RolloutResult(reward=1.0, columns=BlobRef(key="k", size=1, checksum="")) if outcome == "done" else None
        fields = {"attempt": job.attempt, "node": node, "settings": settings, "outcome": outcome, "error": "no store"}
        self.replies.apply(reply_to(job.id, result=result, worker="host-1", **fields))

    def orders(self) -> dict[str, int]:
        orders: Any = self.redis.hgetall(redis_keys.ORDERS)
        return {node.decode(): Order.model_validate_json(order).slots for node, order in orders.items()}


@pytest.fixture
def scene(url: str, ledger: Ledger) -> Iterator[Scene]:
    scene = Scene(url, ledger)
    yield scene
    scene.redis.close()


@pytest.fixture
def moment(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("headpond.orchestrator.workforce.attendance.time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_a_failure_counts_only_when_every_live_worker_is_listed(scene: Scene) -> None:
    scene.announce("a", "b")
    scene.exchange()
    scene.reply("a")
    job = scene.job()
    assert (job.failures, scene.attendance.listed(job)) == (0, ("a",))
    scene.reply("b")
    assert (job.failures, scene.attendance.listed(job)) == (1, ())
    scene.reply("a")
    scene.reply("a")
    assert scene.group.rollouts[0].state is RolloutState.DEAD


def test_the_list_is_bounded_and_then_the_job_is_to_blame(scene: Scene) -> None:
    nodes = [f"w{number}" for number in range(2 * LISTED_MOST)]
    scene.announce(*nodes)
    scene.exchange()
    job = scene.job()
    for node in nodes[: LISTED_MOST - 1]:
        scene.reply(node)
        assert job.failures == 0
    for failures in (1, 2):
        scene.reply(nodes[LISTED_MOST])
        assert (job.failures, len(job.failed_by), scene.attendance.listed(job)) == (failures, LISTED_MOST, ())


def test_a_job_that_failed_or_was_declined_waits_before_it_is_submitted_again(scene: Scene, moment: Clock) -> None:
    scene.announce("a", "b")
    scene.exchange()
    job, pauses = scene.job(), list[float]()
    scene.reply("a")
    for _ in range(8):
        pauses.append(job.not_before - moment.now)
        scene.reply("a", Outcome.DECLINED)
    assert pauses == sorted(pauses)
    assert 0 < pauses[0] < pauses[-1] == PAUSE_MOST_S
    assert (job.failures, job.losses) == (0, 0)
    for _ in range(DECLINES_MOST):
        scene.reply("a", Outcome.DECLINED)
    assert scene.attendance.listed(job) == (), "no other worker takes it: it may run anywhere again"


def test_a_failing_worker_is_ordered_to_stop_tried_again_and_named(scene: Scene, moment: Clock) -> None:
    scene.announce("bad", "good")
    scene.exchange()
    scene.reply("good", Outcome.DONE, number=3)
    for number in range(3):
        scene.reply("bad", number=number)
    assert scene.exchange() == ["bad"]
    assert scene.orders() == {"bad": 0}
    assert "no store" in scene.attendance.excluded["bad"]
    assert "good" not in scene.attendance.excluded
    moment.now += 100
    scene.announce("bad", "good")
    scene.exchange()
    assert scene.orders() == {"bad": 1}
    scene.reply("bad", Outcome.DONE)
    scene.exchange()
    assert scene.orders() == {}
    assert scene.attendance.excluded == {}


def test_a_worker_that_alone_cannot_reach_the_engine_does_not_stop_the_others(scene: Scene) -> None:
    scene.announce("bad", "good")
    scene.exchange()
    for number in range(3):
        scene.reply("bad", Outcome.UNREACHABLE, number=number)
    assert not scene.gates.rollouts.open
    for node in scene.exchange():
        scene.gates.worker_excluded(node)
    assert scene.gates.rollouts.open
    scene.reply("bad", Outcome.UNREACHABLE, number=3)
    assert scene.gates.rollouts.open


def test_a_dead_worker_is_forgotten(scene: Scene, moment: Clock) -> None:
    scene.announce("dead", "alive")
    scene.exchange()
    scene.reply("alive")
    assert scene.job().failures == 0
    moment.now += 2 * LEASE_S
    scene.announce("alive")
    scene.exchange()
    assert scene.redis.hkeys(redis_keys.WORKERS) == [b"alive"]
    scene.reply("alive")
    assert scene.job().failures == 1


def test_a_worker_that_says_nothing_is_silent_while_it_is_listed(scene: Scene, moment: Clock) -> None:
    scene.announce("dead", "alive")
    scene.exchange()
    assert scene.attendance.silent == {}
    moment.now += SILENT_S + 1.0
    scene.announce("alive")
    scene.exchange()
    assert scene.attendance.silent == {"dead": SILENT_S + 1.0}


def test_results_of_a_worker_that_does_not_match_are_not_used_and_the_worker_is_named(scene: Scene) -> None:
    for outcome in (Outcome.DONE, Outcome.FAILED, Outcome.UNREACHABLE):
        scene.reply("old@host", outcome, settings="other")
        assert scene.job().state is JobState.WAITING
    assert (scene.job().failures, scene.gates.rollouts.open) == (0, True)
    assert scene.ledger.unwanted_blobs == ["k"]
    assert "not used" in scene.attendance.excluded["old@host"]
    scene.reply("new@host", Outcome.DONE)
    assert scene.group.rollouts[0].state is RolloutState.GENERATED


def test_a_job_of_an_earlier_start_may_be_settled_with_its_settings(url: str, tmp_path: Path, ledger: Ledger) -> None:
    scene = Scene(url, ledger)
    scene.attendance = Attendance(CONFIG, Broker(url), first_sequence=ledger.state.sequence)
    scene.replies = Replies(CONFIG, ledger, pipeline_of(CONFIG, ledger, scene.gates), scene.attendance)
    scene.reply("old@host", Outcome.DONE, settings="of the earlier start")
    assert scene.group.rollouts[0].state is RolloutState.GENERATED
    scene.redis.close()


def test_a_refused_worker_is_named_with_what_it_says_and_never_counts_as_live(scene: Scene) -> None:
    scene.announce("a")
    scene.announce("other", settings="else", refused="engine.model is 'x' in the run, 'y' in this worker")
    scene.redis.hset(redis_keys.WORKERS, "unreadable", b"{}")
    scene.exchange()
    assert "engine.model is 'x'" in scene.attendance.excluded["other"]
    scene.reply("a")
    assert scene.job().failures == 1


def test_a_blocked_worker_is_named_with_the_line_and_never_counts_as_live(scene: Scene) -> None:
    scene.announce("a")
    scene.announce("blocked", blocked_s=7.0, blocked_at="rollout (bad.py:12)")
    scene.exchange()
    assert list(scene.attendance.excluded) == ["blocked"]
    assert re.search(r"worker blocked .*7 s by rollout \(bad\.py:12\)", scene.attendance.excluded["blocked"])
    scene.reply("a")
    assert scene.job().failures == 1, "no other worker could do better"
    scene.announce("a", "blocked")
    scene.exchange()
    assert scene.attendance.excluded == {}


def test_what_is_published_ends_with_the_orchestrator(scene: Scene) -> None:
    scene.announce("a")
    scene.exchange()
    assert scene.redis.hget(redis_keys.RUN_SETTINGS, "rollouts") == DIGEST.encode()
    assert scene.redis.ttl(redis_keys.RUN_SETTINGS) > 0

    async def end() -> None:
        await leave(Broker(scene.url))

    asyncio.run(end())
    assert not scene.redis.exists(redis_keys.RUN_SETTINGS, redis_keys.ORDERS)

"""Whatever a body does, Redis has exactly one reply of its execution afterwards, and no lease."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from celery.exceptions import Terminated
from pydantic import ValidationError
from support.engine_clients import run
from support.waiting import HANG_S, wait_until

from headpond.broker import redis_keys
from headpond.config import RunConfig
from headpond.errors import EngineUnreachable
from headpond.processes.embedded_redis import EmbeddedRedis
from headpond.records.rollout import RolloutResult
from headpond.replica_use import ReplicaUse
from headpond.tasks import execution
from headpond.tasks.execution import AsyncExecutor, SyncExecutor, WorkerStopping
from headpond.tasks.stage import Outcome, PlanMessage, Reply, Stage, all_stages
from headpond.tasks.stages.filter import FilterResult
from headpond.tasks.stages.play import PlayMessage
from headpond.tasks.stages.score import ScoreResult

COMMON: dict[str, Any] = {"run": "r", "job": "g0000001-0", "attempt": 1, "sequence": 1, "timeout_s": 60.0}
ROLLOUT = PlayMessage(**COMMON, environment="noop", example=0, seed=0)
FILTER = PlanMessage(**COMMON, plan="plans/a.json")
PLAY, FILTERING = all_stages()["play"], all_stages()["filter"]
Body = Callable[[Any], Awaitable[Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis"), appendonly=False) as server:
        yield server


@pytest.fixture
def client(server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        yield client


@pytest.fixture
def config(server: EmbeddedRedis, tmp_path: Path) -> RunConfig:
    return RunConfig.model_validate({"redis_url": server.url, "run_dir": tmp_path})


@pytest.fixture
def prefork(config: RunConfig) -> Iterator[SyncExecutor]:
    executor = SyncExecutor(config)
    yield executor
    executor._leases.stop()


def replies(client: redis.Redis) -> list[Reply]:
    entries: Any = client.xrange(redis_keys.replies("r"))
    return [Reply.model_validate_json(fields[b"reply"]) for _, fields in entries]


def only_reply(client: redis.Redis) -> Reply:
    (reply,) = replies(client)
    # A renewal may have written the lease after its end; the next renewal removes it.
    wait_until(lambda: client.hkeys(redis_keys.LEASES) == [])
    return reply


@asynccontextmanager
async def executor_of(config: RunConfig) -> AsyncIterator[AsyncExecutor]:
    executor = AsyncExecutor(config)
    async with executor.running():
        yield executor


def executed(
    config: RunConfig, body: Body, job: PlayMessage = ROLLOUT, stage: Stage[Any, Any] = PLAY
) -> BaseException | None:
    """The error that the task of the execution ends with. In a thread, as in a worker: the loop of the main thread
    handles KeyboardInterrupt."""
    errors: list[BaseException | None] = []

    async def main() -> None:
        async with executor_of(config) as executor:
            try:
                await executor.execute(replace(stage, body=body), job)
            except BaseException as error:  # noqa: BLE001  returned
                errors.append(error)
            else:
                errors.append(None)

    thread = threading.Thread(target=run, args=(main,))
    thread.start()
    thread.join()
    return errors[0]


async def exits(_: Any) -> None:
    raise SystemExit(3)


async def interrupts(_: Any) -> None:
    raise KeyboardInterrupt


async def raises_cancelled(_: Any) -> None:
    raise asyncio.CancelledError("a task of mine")


async def awaits_a_cancelled_task(_: Any) -> None:
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()
    await task


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (exits, "SystemExit: 3"),
        (interrupts, "KeyboardInterrupt"),
        (raises_cancelled, "CancelledError: a task of mine"),
        (awaits_a_cancelled_task, "CancelledError"),
    ],
)
def test_a_body_that_ends_itself_has_failed(config: RunConfig, client: redis.Redis, body: Body, name: str) -> None:
    assert executed(config, body) is not None
    reply = only_reply(client)
    assert (reply.outcome, reply.result) == (Outcome.FAILED, None)
    assert (reply.error or "").startswith(name)


def test_a_reply_has_what_the_rollout_used_of_the_engine_whatever_its_outcome(
    config: RunConfig, client: redis.Redis
) -> None:
    uses = {"http://a": ReplicaUse(tokens=5, seconds=0.5, lost_tokens=9)}

    async def succeeds(_: Any) -> RolloutResult:
        return RolloutResult(reward=1.0, replica_uses=uses)

    async def fails(_: Any) -> None:
        error = EngineUnreachable("the engine is gone")
        error.replica_uses = uses
        raise error

    for body in (succeeds, fails):
        executed(config, body)
    done, failed = replies(client)
    assert (done.outcome, done.replica_uses) == (Outcome.DONE, uses)
    assert (failed.outcome, failed.replica_uses) == (Outcome.UNREACHABLE, uses)


def test_a_cancelled_execution_is_released(config: RunConfig, client: redis.Redis) -> None:
    async def main() -> None:
        async with executor_of(config) as executor:
            begun = asyncio.Event()

            async def body(_: Any) -> Any:
                begun.set()
                await asyncio.sleep(60)

            task = asyncio.create_task(executor.execute(replace(PLAY, body=body), ROLLOUT))
            await begun.wait()
            task.cancel("stopping")
            with pytest.raises(asyncio.CancelledError):
                await task

    run(main)
    assert only_reply(client).outcome is Outcome.RELEASED


def test_an_execution_whose_run_has_ended_ends(config: RunConfig, client: redis.Redis) -> None:
    """Its worker may be draining, and hears no remote control."""

    async def body(_: Any) -> Any:
        client.set(redis_keys.ENDED, ROLLOUT.run)
        await asyncio.sleep(2 * HANG_S)

    error = executed(config, body)
    assert isinstance(error, Terminated)
    reply = only_reply(client)
    assert (reply.outcome, reply.error) == (Outcome.RELEASED, "Terminated: the run has ended")


@pytest.mark.parametrize(
    ("error", "outcome"), [(WorkerStopping("stopping"), Outcome.RELEASED), (SystemExit(3), Outcome.FAILED)]
)
def test_a_prefork_child_releases_its_job_only_when_its_worker_stops(
    prefork: SyncExecutor, client: redis.Redis, error: SystemExit, outcome: Outcome
) -> None:
    def body(_: Any) -> Any:
        raise error

    with pytest.raises(SystemExit):
        prefork.execute(replace(FILTERING, body=body), FILTER)
    assert only_reply(client).outcome is outcome


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("the file \udcff.txt"), r"ValueError: the file \udcff.txt"),
        (Unprintable(), "Unprintable: its text cannot be read (RuntimeError)"),
        (ValueError("\ud800" * 10_000), "ValueError: " + r"\ud800" * 50),
    ],
)
def test_an_error_text_that_is_not_unicode_is_escaped(
    config: RunConfig, client: redis.Redis, error: Exception, text: str
) -> None:
    async def body(_: Any) -> Any:
        raise error

    assert executed(config, body) is error
    reply = only_reply(client)
    assert reply.outcome is Outcome.FAILED
    assert (reply.error or "").startswith(text)


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (RolloutResult(reward=0.0).model_copy(update={"policy_error": "\ud800"}), "cannot be encoded"),
        (RolloutResult(reward=0.0).model_copy(update={"columns": object()}), "cannot be encoded"),
        (RolloutResult(reward=0.0).model_copy(update={"reward": float("nan")}), "cannot be encoded"),
        (ScoreResult(rewards={f"g0000001-{number}": 0.1 for number in range(100_000)}), "bytes; the limit is"),
    ],
)
def test_a_result_that_cannot_be_sent_is_a_failure(
    config: RunConfig, client: redis.Redis, result: Any, problem: str
) -> None:
    async def body(_: Any) -> Any:
        return result

    stage = all_stages()["score"] if isinstance(result, ScoreResult) else PLAY
    assert executed(config, body, stage=stage) is not None
    reply = only_reply(client)
    assert (reply.outcome, reply.result) == (Outcome.FAILED, None)
    assert problem in (reply.error or "")


def test_a_prefork_result_that_cannot_be_sent_is_a_failure(prefork: SyncExecutor, client: redis.Redis) -> None:
    result = FilterResult().model_copy(update={"masked": ("\ud800",)})
    with pytest.raises(execution.StageError, match="cannot be encoded"):
        prefork.execute(replace(FILTERING, body=lambda _: result), FILTER)
    assert only_reply(client).outcome is Outcome.FAILED


def test_a_prefork_reply_waits_while_redis_is_out_of_memory(prefork: SyncExecutor, client: redis.Redis) -> None:
    client.config_set("maxmemory-policy", "noeviction")

    def body(_: Any) -> FilterResult:
        client.config_set("maxmemory", "1")
        threading.Timer(1.0, lambda: client.config_set("maxmemory", "0")).start()
        return FilterResult()

    try:
        prefork.execute(replace(FILTERING, body=body), FILTER)
    finally:
        client.config_set("maxmemory", "0")
    assert only_reply(client).outcome is Outcome.DONE


def test_a_rollout_that_is_stored_too_slowly_is_no_failure_of_the_policy(
    config: RunConfig, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "GRACE_S", 0.1)

    async def seals_slowly(_: Any) -> Any:
        await asyncio.sleep(60)

    executed(config, seals_slowly, ROLLOUT.model_copy(update={"timeout_s": 0.1}))
    reply = only_reply(client)
    assert (reply.outcome, reply.result) == (Outcome.UNWRITTEN, None)
    assert "not stored within" in (reply.error or "")


@pytest.mark.parametrize("duration_s", ["NaN", "Infinity", "-1"])
def test_a_reply_whose_duration_is_no_duration_is_refused(duration_s: str) -> None:
    """The ledger sums durations: NaN would stay in it."""
    reply = Reply(
        stage="filter", run="r", job="g0000001-filter", attempt=1, execution="x", worker="w", node="n", settings="s",
        outcome=Outcome.DONE,
    )  # fmt: skip
    text = reply.model_dump_json().replace('"duration_s":0.0', f'"duration_s":{duration_s}')
    with pytest.raises(ValidationError, match="duration_s"):
        Reply.model_validate_json(text)

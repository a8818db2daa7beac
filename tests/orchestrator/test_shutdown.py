"""Revoking saves work and is never waited for."""

import asyncio
import logging
import socket
from pathlib import Path

import orjson
import pytest
from support.ledgers import admitted, configured, replies_of, reply_to, submitted
from support.waiting import HANG_S, wait_until_async

from headpond.broker import redis_keys
from headpond.broker.queues import Queue
from headpond.ledger.states import GroupState, JobState
from headpond.orchestrator import shutdown
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.orchestrator.exchange.reply_stream import ReplyStream
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.shutdown import Shutdown
from headpond.orchestrator.submission import MESSAGES_AT_ONCE
from headpond.processes.embedded_redis import EmbeddedRedis
from headpond.records.rollout import RolloutResult


async def revoke(url: str, ledger: Ledger, directory: Path, *, times: int = 1) -> None:
    config = configured(run_dir=directory, redis_url=url)
    broker = Broker(url)
    end = Shutdown(config, "run", ledger, broker, ReplyStream("run", broker, ledger))
    for _ in range(times):
        await end.revoke(["run.g0000000-0.1"])
    await broker.close()


def test_a_redis_that_does_not_answer_delays_nothing(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutdown, "REVOKE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, caplog.at_level(logging.WARNING):

        async def main() -> None:
            await revoke(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", ledger, tmp_path, times=2)
            silent.shutdown(socket.SHUT_RDWR)

        asyncio.run(main())
    assert "Redis has not answered in 0.2 s" in caplog.text
    assert "the call before has not returned" in caplog.text


def test_a_redis_that_is_away_ends_nothing(ledger: Ledger, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        asyncio.run(revoke("redis://127.0.0.1:9/0", ledger, tmp_path))
    assert "action=not_revoked" in caplog.text


def test_a_group_that_advances_while_the_run_ends_leaves_no_open_job(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the slices, the last reply of a group arrives and adds its filtering job."""
    monkeypatch.setattr(shutdown, "CANCELLED_AT_ONCE", 1)
    config = configured(run_dir=tmp_path)
    first, later = submitted(ledger), submitted(ledger, 2)
    admitted(ledger)
    replies = replies_of(config, ledger)
    broker = Broker("redis://unused/0")
    end = Shutdown(config, "run", ledger, broker, ReplyStream("run", broker, ledger))

    async def main() -> None:
        cancelling = asyncio.create_task(end._cancel_open_work())  # pyright: ignore[reportPrivateUsage]
        for _ in range(2):
            await asyncio.sleep(0)
        assert (first.state, later.state) == (GroupState.CLOSED, GroupState.PLAYING)
        for rollout in later.rollouts:
            replies.apply(reply_to(rollout.id, result=RolloutResult(reward=0.0)))
        assert later.state == "filter"
        while not cancelling.done():  # a kill at this point leaves no job of a closed group in the ledger
            assert {job.subject for job in ledger.jobs.values()} <= ledger.groups.keys()
            await asyncio.sleep(0)
        await ledger.committed()

    asyncio.run(main())
    assert (ledger.groups, ledger.jobs, ledger.waiting) == ({}, {}, {})
    assert ledger.reasons == {"run_ended": 10}
    assert not any(ledger.job_counts.values())


def test_queued_jobs_wait_again_when_the_run_drains(ledger: Ledger, tmp_path: Path) -> None:
    """More messages than are taken at once, one of them of another program; a job is running."""
    config = configured(run_dir=tmp_path, recovery={"drain_s": 2 * HANG_S})
    groups = [submitted(ledger) for _ in range(MESSAGES_AT_ONCE // 2)]
    jobs = [ledger.jobs[rollout.id] for group in groups for rollout in group.rollouts]

    async def main(server: EmbeddedRedis) -> None:
        broker = Broker(server.url)
        messages = [orjson.dumps({"headers": {"id": job.task_id("run")}}) for job in jobs[1:]]
        await broker.client.lpush(Queue.ROLLOUTS, b"of another program", *messages)
        draining = asyncio.create_task(
            Shutdown(config, "run", ledger, broker, ReplyStream("run", broker, ledger)).drain()
        )
        await wait_until_async(lambda: ledger.job_counts[Queue.ROLLOUTS, JobState.SUBMITTED] == 1)
        assert await broker.client.llen(Queue.ROLLOUTS) == 0
        assert [job.state for job in jobs] == [JobState.SUBMITTED, *[JobState.WAITING] * (len(jobs) - 1)]
        assert not draining.done()
        ledger.end(jobs[0], JobState.SETTLED)
        await draining
        await ledger.committed()
        await broker.close()

    with EmbeddedRedis(tmp_path / "redis") as server:
        asyncio.run(main(server))


def test_executions_learn_of_the_end_of_their_run_with_their_leases(ledger: Ledger, tmp_path: Path) -> None:
    config = configured(run_dir=tmp_path, recovery={"lease_s": HANG_S})

    async def main(server: EmbeddedRedis) -> None:
        broker = Broker(server.url)
        await broker.client.hset(redis_keys.LEASES, "run.g0000000-0.1.abc", "host-1:7")
        end = Shutdown(config, "run", ledger, broker, ReplyStream("run", broker, ledger))
        finishing = asyncio.create_task(end.finish())
        await wait_until_async(lambda: broker.client.get(redis_keys.ENDED))
        assert await broker.client.get(redis_keys.ENDED) == b"run"
        assert not finishing.done()
        await broker.client.hdel(redis_keys.LEASES, "run.g0000000-0.1.abc")
        await finishing
        assert await broker.client.keys("headpond:*") == [redis_keys.ENDED.encode()], "for workers that were cut off"
        assert 0 < await broker.client.ttl(redis_keys.ENDED) <= redis_keys.ENDED_TTL_S
        await end.resume()
        assert not await broker.client.exists(redis_keys.ENDED)
        await broker.close()

    with EmbeddedRedis(tmp_path / "redis") as server:
        asyncio.run(main(server))


def test_the_end_of_a_run_removes_leases_of_every_run(ledger: Ledger, tmp_path: Path) -> None:
    """Their workers may have died too shortly before for the leases to have expired."""
    config = configured(run_dir=tmp_path, recovery={"lease_s": 1.0})
    leases = ("other.g0000000-0.1.abc", "of another program")

    async def main(server: EmbeddedRedis) -> None:
        broker = Broker(server.url)
        await broker.client.hset(redis_keys.LEASES, mapping=dict.fromkeys(leases, "host-1:7"))
        await Shutdown(config, "run", ledger, broker, ReplyStream("run", broker, ledger)).finish()
        assert not await broker.client.exists(redis_keys.LEASES)
        await broker.close()

    with EmbeddedRedis(tmp_path / "redis") as server:
        asyncio.run(main(server))

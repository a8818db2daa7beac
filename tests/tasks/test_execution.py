"""The reply of an execution, by how its body ended, and how it is written."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from headpond.broker import redis_keys
from headpond.errors import ERROR_CHARACTERS, BlobUnwritten, EngineUnreachable, InfrastructureFailure, PolicyFailure
from headpond.processes.embedded_redis import EmbeddedRedis
from headpond.tasks.agreement import FAILED_BY_HEADER, SETTINGS_HEADER, Identity, headers
from headpond.tasks.execution import PIPELINE_WRITES, EncodedReply, Execution, Outbox, write_lease
from headpond.tasks.stage import Outcome, PlanMessage, Reply, all_stages
from headpond.tasks.stages.play import PlayMessage

IDENTITY = Identity(node="rollouts-7@host", settings="0123")
COMMON: dict[str, Any] = {"run": "r", "job": "g0000001-0", "attempt": 1, "sequence": 1, "timeout_s": 1.0}
ROLLOUT = PlayMessage(**COMMON, environment="noop", example=0, seed=0)
FILTER = PlanMessage(**COMMON, plan="plans/a.json")
PLAY, FILTERING = all_stages()["play"], all_stages()["filter"]


def decoded(reply: EncodedReply) -> Reply:
    return Reply.model_validate_json(reply.content)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (InfrastructureFailure("sandbox down"), Outcome.FAILED),
        (ValueError("a bug"), Outcome.FAILED),
        (EngineUnreachable("refused"), Outcome.UNREACHABLE),
        (BlobUnwritten("disk full"), Outcome.UNWRITTEN),
        (asyncio.CancelledError("of its own"), Outcome.FAILED),
        (SystemExit(3), Outcome.FAILED),
        (PolicyFailure("outside of a rollout"), Outcome.FAILED),
        (TimeoutError(), Outcome.FAILED),
    ],
)
def test_the_error_decides_the_outcome(error: BaseException, outcome: Outcome) -> None:
    for stage, job in ((PLAY, ROLLOUT), (FILTERING, FILTER)):
        execution = Execution(stage=stage, job=job, worker="w", identity=IDENTITY)
        reply = decoded(execution.failed(error))
        assert (reply.outcome, reply.result) == (outcome, None)
        assert decoded(execution.failed(error, released=True)).outcome is Outcome.RELEASED


def test_only_a_rollout_that_is_over_its_time_waits_for_the_store() -> None:
    assert isinstance(Execution(stage=PLAY, job=ROLLOUT, worker="w", identity=IDENTITY).timed_out(), BlobUnwritten)
    assert isinstance(Execution(stage=FILTERING, job=FILTER, worker="w", identity=IDENTITY).timed_out(), TimeoutError)


def test_a_long_error_is_shortened() -> None:
    reply = Execution(stage=PLAY, job=ROLLOUT, worker="w", identity=IDENTITY).failed(ValueError("x" * 10_000))
    assert len(decoded(reply).error or "") == ERROR_CHARACTERS


def test_two_executions_of_one_message_hold_two_leases() -> None:
    leases = {Execution(stage=PLAY, job=ROLLOUT, worker="w", identity=IDENTITY).lease for _ in range(2)}
    assert len(leases) == 2
    assert all(lease.startswith("r.g0000001-0.1.") for lease in leases)


@pytest.mark.parametrize(
    ("sent", "declined"),
    [
        ({}, False),
        ({SETTINGS_HEADER: "", FAILED_BY_HEADER: []}, False),
        ({SETTINGS_HEADER: "0123", FAILED_BY_HEADER: ["rollouts-8@host"]}, False),
        ({SETTINGS_HEADER: "4567"}, True),
        ({SETTINGS_HEADER: "0123", FAILED_BY_HEADER: ["rollouts-7@host"]}, True),
    ],
)
def test_a_message_for_other_settings_or_that_lists_this_worker_is_declined(
    sent: dict[str, Any], declined: bool
) -> None:
    token = headers.set(sent)
    try:
        reply = Execution(stage=PLAY, job=ROLLOUT, worker="w", identity=IDENTITY).declined()
    finally:
        headers.reset(token)
    assert (reply is not None) == declined
    if reply is not None:
        read = decoded(reply)
        assert (read.outcome, read.node, read.settings) == (Outcome.DECLINED, "rollouts-7@host", "0123")


def test_concurrent_writes_share_a_round_trip_and_their_keys_expire(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        commands, leases, ttl_s = asyncio.run(write_at_once(server.url, PIPELINE_WRITES))
    assert commands["cmdstat_exec"]["calls"] == 1
    assert commands["cmdstat_expire"]["calls"] == 1
    assert leases == PIPELINE_WRITES
    assert 0 < ttl_s <= redis_keys.LEASES_TTL_S


async def write_at_once(url: str, count: int) -> tuple[dict[str, Any], int, int]:
    async with redis.asyncio.Redis.from_url(url) as client:
        outbox = Outbox(client)
        running = asyncio.create_task(outbox.run())
        await asyncio.gather(
            *(
                outbox.write(lambda pipe, number=number: write_lease(pipe, f"lease{number}", "w:1"))
                for number in range(count)
            )
        )
        running.cancel()
        return (
            await client.info("commandstats"),
            await client.hlen(redis_keys.LEASES),
            await client.ttl(redis_keys.LEASES),
        )

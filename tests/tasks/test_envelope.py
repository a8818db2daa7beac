"""The orchestrator's messages, compared with those that Celery and kombu put into Redis."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from headpond.errors import StageError
from headpond.processes.embedded_redis import EmbeddedRedis
from headpond.tasks import app, envelope
from headpond.tasks.agreement import FAILED_BY_HEADER, SETTINGS_HEADER
from headpond.tasks.stage import Message, PlanMessage, all_stages
from headpond.tasks.stages.encode import EncodeMessage
from headpond.tasks.stages.play import PlayMessage

COMMON: dict[str, Any] = {"run": "0123456789ab", "attempt": 2, "sequence": 17, "timeout_s": 60.0}
JOBS: dict[str, Message] = {
    "play": PlayMessage(**COMMON, job="g0000001-3", environment="noop", example=0, seed=1),
    "filter": PlanMessage(**COMMON, job="g0000001-filter", plan="plans/a.json"),
    "advantage": PlanMessage(**COMMON, job="g0000001-advantage", plan="plans/a.json"),
    "encode": EncodeMessage(**COMMON, job="s000001f1r0", plan="plans/b.json", step=1, data_rank=0),
}
PLAY = all_stages()["play"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        app.conf.update(broker_url=server.url)
        with redis.Redis.from_url(server.url) as client:
            yield client
        app.pool.force_close_all()


@pytest.mark.parametrize("name", JOBS)
def test_a_message_equals_celerys(client: redis.Redis, name: str) -> None:
    stage, job = all_stages()[name], JOBS[name]
    task = app.tasks[stage.task]
    options = {"argsrepr": "", "kwargsrepr": "", "ignore_result": True, "time_limit": 100.0}
    task.apply_async((job.model_dump(),), task_id=job.task_id, **options)
    theirs = json.loads(client.rpop(stage.queue))  # type: ignore[arg-type]
    ours = json.loads(envelope.encode(stage, job))

    assert ours["headers"].pop(envelope.SEQUENCE_HEADER) == 17
    assert ours["headers"].pop(SETTINGS_HEADER) == ""
    assert ours["headers"].pop(FAILED_BY_HEADER) == []
    assert ours["headers"] | {"origin": None} == theirs["headers"] | {"origin": None}
    assert json.loads(ours["body"]) == json.loads(theirs["body"])
    for message in (ours, theirs):
        del message["headers"], message["body"]
        del message["properties"]["delivery_tag"], message["properties"]["reply_to"]  # random
        for name in ("argsrepr", "kwargsrepr", "time_limit"):  # options that kombu copies and no consumer reads
            message["properties"].pop(name, None)
        del message["properties"]["delivery_info"]  # theirs names an exchange, ours needs none
    assert ours == theirs


def test_the_sequence_is_read_from_headponds_messages_only() -> None:
    job = JOBS["play"]
    assert envelope.sequence_of(envelope.encode(PLAY, job), job.run) == 17
    assert envelope.sequence_of(envelope.encode(PLAY, job), "another") is None
    assert envelope.sequence_of(b'{"headers": {}}', job.run) is None
    assert envelope.sequence_of(b"not json", job.run) is None
    assert envelope.sequence_of(b'{"headers": {"headpond_sequence": 17, "id": "x"}}', job.run) is None


def test_a_message_over_the_limit_is_refused() -> None:
    with pytest.raises(StageError, match="4096"):
        envelope.encode(all_stages()["filter"], PlanMessage(**COMMON, job="g0000001-filter", plan="p" * 5000))


def test_every_attempt_has_its_own_delivery_tag() -> None:
    attempts = [JOBS["play"].model_copy(update={"attempt": attempt}) for attempt in range(1, 11)]
    assert len({json.loads(envelope.encode(PLAY, job))["properties"]["delivery_tag"] for job in attempts}) == 10

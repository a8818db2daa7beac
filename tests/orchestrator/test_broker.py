import asyncio
import socket
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from support.waiting import wait_until_async

from orchestrator.broker import Broker
from penstock.errors import ConfigError
from penstock.runtime.embedded_redis import EmbeddedRedis

PASSWORD = "hunter2/#?"
NOBODY = "127.0.0.1:1/0"
LONG_S = 3600  # longer than any test may take


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("guarded"), password=PASSWORD) as server:
        yield server


async def connected(url: str, patience_s: float = 0.2) -> Broker:
    broker = Broker(url)
    try:
        await broker.start(patience_s=patience_s)
    finally:
        await broker.close()
    return broker


def refusal(started: Coroutine[Any, Any, Broker]) -> str:
    with pytest.raises(ConfigError) as refused:
        asyncio.run(started)
    assert "hunter2" not in str(refused.value)
    return str(refused.value)


def test_the_right_password_opens_the_door(guarded: EmbeddedRedis) -> None:
    assert asyncio.run(connected(guarded.url)).trouble is None


def test_a_wrong_or_missing_password_is_refused_at_once(guarded: EmbeddedRedis) -> None:
    address = f"127.0.0.1:{guarded.port}/0"
    wrong = refusal(connected(f"redis://:hunter2@{address}", patience_s=LONG_S))
    missing = refusal(connected(f"redis://{address}", patience_s=LONG_S))
    assert wrong.startswith(f"Redis at redis://{address} refuses the password: put the right one into the environment")
    assert missing.startswith(f"Redis at redis://{address} asks for a password: put")


def test_a_database_that_is_not_there_is_refused_at_once(guarded: EmbeddedRedis) -> None:
    message = refusal(connected(guarded.url.removesuffix("/0") + "/9999", patience_s=LONG_S))
    assert "/9999 cannot be used (DB index is out of range)" in message


def test_nobody_there_is_said_after_some_patience() -> None:
    message = refusal(connected(f"redis://{NOBODY}"))
    assert f"{NOBODY} cannot be used" in message
    assert "start it, or set redis_url (PENSTOCK_REDIS_URL) to the right one" in message


def test_somebody_there_who_says_nothing_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.broker.ANSWER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}/0"
        assert f"{address} cannot be used (it takes too long): start it" in refusal(connected(f"redis://{address}"))


def test_a_question_is_asked_until_redis_is_back(guarded: EmbeddedRedis) -> None:
    async def ask_across_a_crash() -> None:
        broker = Broker(guarded.url)
        await broker.ask(lambda client: client.ping())
        guarded.kill()
        question = asyncio.create_task(broker.ask(lambda client: client.ping()))
        trouble = await wait_until_async(lambda: broker.trouble)
        assert "does not answer" in trouble
        assert "hunter2" not in trouble
        guarded.restart()
        assert await question
        assert broker.trouble is None
        assert broker.outages == 1
        await broker.close()

    asyncio.run(ask_across_a_crash())

import asyncio
import socket
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from support.waiting import wait_until_async

from headpond.errors import ConfigError
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.processes.embedded_redis import EmbeddedRedis

PASSWORD = "hunter2/#?"
CLOSED_PORT = "127.0.0.1:1/0"
LONG_S = 3600  # longer than the time limit of a test


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("guarded"), password=PASSWORD) as server:
        yield server


async def connected(url: str, patience_s: float = 0.2) -> Broker:
    broker = Broker(url)
    try:
        await broker.connect(patience_s=patience_s)
    finally:
        await broker.close()
    return broker


def refusal(started: Coroutine[Any, Any, Broker]) -> str:
    with pytest.raises(ConfigError) as refused:
        asyncio.run(started)
    assert "hunter2" not in str(refused.value)
    return str(refused.value)


def test_the_right_password_is_accepted(guarded: EmbeddedRedis) -> None:
    assert asyncio.run(connected(guarded.url)).trouble.text is None


def test_a_wrong_or_missing_password_is_refused_at_once(guarded: EmbeddedRedis) -> None:
    address = f"127.0.0.1:{guarded.port}/0"
    wrong = refusal(connected(f"redis://:hunter2@{address}", patience_s=LONG_S))
    missing = refusal(connected(f"redis://{address}", patience_s=LONG_S))
    assert wrong.startswith(f"Redis at redis://{address} refuses the password: set it in the environment")
    assert missing.startswith(f"Redis at redis://{address} requires a password: set")


def test_a_missing_database_is_refused_at_once(guarded: EmbeddedRedis) -> None:
    message = refusal(connected(guarded.url.removesuffix("/0") + "/9999", patience_s=LONG_S))
    assert "/9999 cannot be used (DB index is out of range)" in message


def test_a_closed_port_is_refused_after_the_patience() -> None:
    message = refusal(connected(f"redis://{CLOSED_PORT}"))
    assert f"{CLOSED_PORT} cannot be used" in message
    assert "redis_url (HEADPOND_REDIS_URL)" in message


def test_a_server_that_does_not_answer_is_reported_as_timed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headpond.orchestrator.exchange.redis_connection.RESPONSE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}/0"
        assert f"{address} cannot be used (timed out)" in refusal(connected(f"redis://{address}"))


def test_a_command_is_retried_until_redis_is_back(guarded: EmbeddedRedis) -> None:
    async def call_across_a_crash() -> None:
        broker = Broker(guarded.url)
        await broker.call(lambda client: client.ping())
        guarded.kill()
        call = asyncio.create_task(broker.call(lambda client: client.ping()))
        trouble = await wait_until_async(lambda: broker.trouble.text)
        assert "does not answer" in trouble
        assert "hunter2" not in trouble
        guarded.restart()
        assert await call
        assert broker.trouble.text is None
        assert broker.outages == 1
        await broker.close()

    asyncio.run(call_across_a_crash())

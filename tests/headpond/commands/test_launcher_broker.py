"""The database that `headpond up` takes of a Redis which is configured."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from support.waiting import wait_until

from headpond import config
from headpond.commands.launcher.broker import DATABASES, RunBroker, with_database, with_password
from headpond.config.redis_address import address
from headpond.errors import ConfigError, RunError
from headpond.processes.embedded_redis import EmbeddedRedis


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Of a server, without a database."""
    with EmbeddedRedis(tmp_path / "redis") as server:
        yield server.url.rpartition("/")[0]


def occupy(url: str, *numbers: int) -> None:
    for number in numbers:
        with redis.Redis.from_url(f"{url}/{number}") as client:
            client.set("key", 1)


def test_the_first_empty_database_is_taken(url: str, tmp_path: Path) -> None:
    assert with_database(url, tmp_path) == f"{url}/0"
    occupy(url, 0, 1, 3)
    assert with_database(url, tmp_path) == f"{url}/2"
    assert with_database(f"{url}/", tmp_path) == f"{url}/2"


def test_a_database_that_is_named_is_used_also_if_it_is_not_empty(url: str, tmp_path: Path) -> None:
    occupy(url, 3)
    assert with_database(f"{url}/3", tmp_path) == f"{url}/3"


def test_a_run_that_has_begun_keeps_its_database(url: str, tmp_path: Path) -> None:
    occupy(url, 0, 4)
    identity = {"run": "r", "release": "0.2.0 (x)", "ledger": "ledger.sqlite", "store": "store", "settings": {}}
    (tmp_path / "run.json").write_text(json.dumps(identity | {"redis": address(f"{url}/4")}))
    assert with_database(url, tmp_path) == f"{url}/4"


def test_a_server_without_an_empty_database_is_refused(url: str, tmp_path: Path) -> None:
    occupy(url, *range(DATABASES))
    with pytest.raises(RunError, match=r"databases 0 to 15 .*redis_url"):
        with_database(url, tmp_path)


def test_the_password_of_the_environment_is_added_and_not_shown(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_PASSWORD", "a/b c")
    assert with_password("redis://first:6379/0") == "redis://:a%2Fb%20c@first:6379/0"
    assert with_password("redis://:mine@first:6379/0") == "redis://:mine@first:6379/0"
    assert "a/b" not in address(with_password("redis://first:6379/0"))


def test_an_own_server_is_started_in_the_run_directory_and_again_when_it_dies(tmp_path: Path) -> None:
    broker = RunBroker(config.load(None, flags={"run_dir": tmp_path}, environ={}))
    broker.start()
    try:
        assert (tmp_path / "redis").is_dir()
        assert (broker.check(), broker.restarts) == (False, 0)
        occupy(broker.url.rpartition("/")[0], 0)
        with redis.Redis.from_url(broker.url) as client:
            os.kill(client.info("server")["process_id"], signal.SIGKILL)
        wait_until(broker.check, what="its end")
        assert broker.restarts == 1
        with redis.Redis.from_url(broker.url) as client:
            assert client.ping()
    finally:
        broker.stop()


def test_a_configured_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    settings = config.load(None, flags={"run_dir": tmp_path, "redis_url": "redis://127.0.0.1:1/0"}, environ={})
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1"):
        RunBroker(settings).start()

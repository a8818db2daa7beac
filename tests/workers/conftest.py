"""A Redis server, workers on it, the reports of their bodies, and the events of a monitor."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from support.waiting import wait_until
from support.worker_process import WorkerProcess

from headpond.processes.embedded_redis import EmbeddedRedis
from tests.workers.pool_app import app

StartWorker = Callable[..., WorkerProcess]


class Bodies:
    """What the bodies report through Redis, and the gate that they wait for."""

    def __init__(self, url: str) -> None:
        self.redis = redis.Redis.from_url(f"{url}/1", decode_responses=True)
        self.broker = redis.Redis.from_url(f"{url}/0", decode_responses=True)

    def all(self, key: str) -> list[str]:
        return self.redis.lrange(key, 0, -1)

    def wait_for(self, key: str, count: int) -> list[str]:
        wait_until(lambda: self.redis.llen(key) >= count, what=f"{count} in {key}: {self.all(key)}")
        return self.all(key)

    def open_gate(self) -> None:
        self.redis.set("gate", 1)

    def close_gate(self) -> None:
        self.redis.delete("gate", "gate_is")
        wait_until(lambda: self.redis.get("gate_is") == "closed")


class Events:
    """The events that a monitor such as Flower receives."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self._receiver = app.events.Receiver(app.connection_for_read(), handlers={"*": self.received.append})
        self._thread = threading.Thread(target=self._capture)
        self._thread.start()

    def of(self, task_id: str) -> list[str]:
        return [event["type"] for event in self.received if event.get("uuid") == task_id]

    def wait_for(self, task_id: str, kind: str) -> dict[str, Any]:
        def event() -> dict[str, Any] | None:
            return next((e for e in list(self.received) if (e.get("uuid"), e["type"]) == (task_id, kind)), None)

        return wait_until(event, what=f"{kind} of {task_id}, received {self.of(task_id)}")

    def stop(self) -> None:
        self._receiver.should_stop = True
        self._thread.join()

    def _capture(self) -> None:
        self._receiver.capture(limit=None, timeout=None, wakeup=False)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Without a database: 0 is the broker's, 1 the bodies'."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis"), appendonly=False) as server:
        app.conf.broker_url = server.url
        yield server.url.removesuffix("/0")


@pytest.fixture
def bodies(redis_url: str) -> Iterator[Bodies]:
    bodies = Bodies(redis_url)
    yield bodies
    bodies.redis.flushdb()


@pytest.fixture(scope="module")
def start_worker(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartWorker]:
    """`start_worker("name", "-c", "4")` starts a worker on the queue "name" of the test app."""
    logs: Path = tmp_path_factory.mktemp("workers")
    with ExitStack() as started:

        def start(name: str, *options: str, ready: bool = True, **env: str) -> WorkerProcess:
            quiet = ["--without-mingle", "--without-gossip", "--without-heartbeat"]
            worker = WorkerProcess(
                "tests.workers.pool_app",
                *("-Q", name, *quiet, *options),
                name=name,
                log=logs / f"{name}.log",
                env={"POOL_APP_REDIS": redis_url, "POOL_APP_CLIENT": name, **env},
            )
            started.push(worker.__exit__)
            worker.start()
            if ready:
                worker.wait_ready()
            return worker

        yield start


@pytest.fixture(scope="session")
def events(redis_url: str) -> Iterator[Events]:
    events = Events()
    broker = redis.Redis.from_url(redis_url)
    wait_until(lambda: broker.pubsub_numpat() > 0, what="the monitor's subscription")
    yield events
    events.stop()

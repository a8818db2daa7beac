"""Shared fixtures: one loop, one session server, one child process with the package (it takes seconds to start)."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support.engine_clients import attempt_of, loaded
from support.session_process import Script, SessionsProcess, running, scripted
from support.stores import directory_store

from headpond.config.engine import Engine, Policy
from headpond.config.sessions import Sessions
from headpond.engines.dialects import dialect_of
from headpond.engines.http.client import EngineClient
from headpond.environments.verifiers import Verifiers
from headpond.event_loop.factory import event_loop_factory
from headpond.playing.agent_sessions import SessionServers
from headpond.playing.rollout import PlayResources, play
from headpond.records.rollout import RolloutResult

T = TypeVar("T")
HERE = Path(__file__).parent
TRICKS = [
    *("answers", "boxed", "nan", "raises", "agent_timeout", "scoring_timeout", "finalize_timeout", "setup_timeout"),
    *("swallows", "exits", "prints_environment", "program", "kills_itself", "hangs"),
]
SECRET = "redis://:hunter2@127.0.0.1/0"


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with scripted() as script:
        yield script


@pytest.fixture(scope="module")
def server(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionsProcess]:
    directory = tmp_path_factory.mktemp("sessions")
    with running(directory, script.server.url, "--require-secret", policy__max_turns="2") as server:
        yield server


@pytest.fixture(scope="module")
def on_loop() -> Iterator[Callable[[Coroutine[Any, Any, T]], T]]:
    with asyncio.Runner(loop_factory=event_loop_factory(concurrency=64)) as runner:
        yield runner.run


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory where tasks leave marks."""
    return tmp_path_factory.mktemp("marks")


@pytest.fixture(scope="module")
def tricks(on_loop: Any, marks: Path) -> Iterator[Verifiers]:
    changes = {"PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}", "TRICKS_MARKS": str(marks)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**changes, "HEADPOND_REDIS_URL": SECRET}.items():
            patch.setenv(name, value)
        config = {"taskset": {"tricks": TRICKS}}
        environment = Verifiers(taskset="tricks", size=len(TRICKS), metrics=["length"], config=config)
        yield environment
        on_loop(environment.close())


Stages = Callable[[], AbstractAsyncContextManager[PlayResources]]


@pytest.fixture(scope="module")
def stages(server: SessionsProcess) -> Stages:
    """A new stage for each run of the loop."""

    @asynccontextmanager
    async def stage() -> AsyncIterator[PlayResources]:
        engine, sessions_settings = Engine(model="the-policy"), Sessions(urls=(server.url,))
        async with EngineClient.open(engine) as client, SessionServers.open(sessions_settings) as sessions:
            yield PlayResources(
                client=client,
                store=directory_store(server.store),
                settings=Policy(),
                dialect=dialect_of(engine),
                sessions=sessions,
            )

    return stage


@pytest.fixture
def played(tricks: Verifiers, stages: Stages, server: SessionsProcess, on_loop: Any) -> Iterator[Any]:
    """Plays one rollout of a trick and checks that no session is left open."""

    async def main(trick: str, timeout_s: float) -> RolloutResult:
        async with stages() as stage:
            attempt = attempt_of(trick, timeout_s=timeout_s)
            return await play(stage, loaded(tricks, name="tricks"), TRICKS.index(trick), attempt)

    yield lambda trick, timeout_s=60.0: on_loop(main(trick, timeout_s))
    assert server.status()["sessions"]["open"] == 0


@pytest.fixture(scope="module")
def example() -> Callable[[str], int]:
    return TRICKS.index

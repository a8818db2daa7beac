"""A rollout that is cancelled anywhere leaves no claim, session, process, handle, file or memory."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support import graders
from support.cancellation import cancelled_at
from support.engine_clients import assert_idle, attempt_of, files, loaded, run
from support.processes import children
from support.session_process import Script, SessionsProcess, running, scripted
from support.stores import directory_store
from support.upstream import Response, calling, tool_call, user
from support.waiting import wait_until_async

from headpond.config.engine import Engine, Policy
from headpond.config.sessions import Sessions
from headpond.engines.dialects import dialect_of
from headpond.engines.http.client import EngineClient
from headpond.environments import AgentPolicy, Completion, Tools, graded, run_program, tool
from headpond.event_loop.offload import in_file_thread
from headpond.playing.agent_sessions import SessionServers
from headpond.playing.rollout import PlayResources, play, score_group
from headpond.recording import Session


@dataclass
class Scene:
    """What a rollout does after its first turn, and how the test sees that it has started."""

    directory: Path
    script: Script
    go_on: threading.Event
    begun: int = 0
    busy: Sequence[asyncio.Task[Any]] = ()

    @property
    def mark(self) -> Path:
        return self.directory / "mark"

    def is_there(self) -> bool:
        """The mark was written, a request is in flight, or a tool has started."""
        return bool(self.begun or self.script.server.answering or (self.mark.exists() and self.mark.read_text()))


Then = Callable[[Scene, Any], Awaitable[None]]


async def chat(policy: Any, text: str) -> None:
    if not isinstance(policy, AgentPolicy):
        await policy.chat([user(text)])
        return
    headers = {"Authorization": f"Bearer {policy.api_key}"}
    url, request = f"{policy.base_url}/chat/completions", {"messages": [user(text)]}
    async with aiohttp.ClientSession(headers=headers) as http, http.post(url, json=request) as response:
        assert response.status == 200
        await response.read()


async def in_a_turn(scene: Scene, policy: Any) -> None:
    await chat(policy, "hang")


async def in_a_tool(scene: Scene, policy: Any) -> None:
    @tool
    async def waits() -> str:
        scene.begun += 1
        await asyncio.sleep(1000)
        return ""

    @tool
    def blocks() -> str:
        scene.go_on.wait(60)
        return ""

    calls = [tool_call(name, {}, id=str(number)) for number, name in enumerate(["waits", "blocks", "waits"])]
    await Tools(waits, blocks).answer(Completion(message=calling(*calls), finish_reason="", truncated=False))


async def in_grading(scene: Scene, policy: Any) -> None:
    await graded(graders.catastrophic_by_name, str(scene.mark), timeout_s=1000)


async def in_line_for_a_grader(scene: Scene, policy: Any) -> None:
    await asyncio.gather(
        *(graded(graders.waits, str(scene.mark), str(scene.directory / "no"), timeout_s=1000) for _ in range(8))
    )


async def in_a_program(scene: Scene, policy: Any) -> None:
    unused = AgentPolicy(base_url="", api_key="")
    await run_program(["/bin/sh", "-c", f"sleep 1000 & echo $! > {scene.mark}; wait"], unused)


async def in_sealing(scene: Scene, policy: Any) -> None:
    """Sealing waits for a file thread: all are blocked."""
    scene.busy = [asyncio.create_task(in_file_thread(scene.go_on.wait, 60)) for _ in range(2)]
    await asyncio.sleep(0)
    scene.begun += 1


async def nothing(scene: Scene, policy: Any) -> None:
    pass


class Plays:
    def __init__(self, scene: Scene, then: Then) -> None:
        self._scene = scene
        self._then = then

    async def rollout(self, example: Any, policy: Any) -> float:
        await chat(policy, "hello")
        await self._then(self._scene, policy)
        return 1.0


class PlaysByUrl(Plays):
    external_agent = True


DOORS = {"recorded": Plays, "agent": PlaysByUrl}


@pytest.fixture(autouse=True)
def _short_keep_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle connection to the engine is a handle until its 4 s are over."""
    monkeypatch.setattr("headpond.engines.http.transport.KEEP_ALIVE_S", 0.1)


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with scripted() as script:
        script.responses["hang"] = lambda _: Response(hangs=True)
        yield script


@pytest.fixture(scope="module")
def server(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionsProcess]:
    with running(tmp_path_factory.mktemp("sessions"), script.server.url) as server:
        yield server


@asynccontextmanager
async def stage_with(server: SessionsProcess, script: Script) -> AsyncIterator[PlayResources]:
    engine = Engine(urls=(script.server.url,))
    async with EngineClient.open(engine) as client, SessionServers.open(Sessions(urls=(server.url,))) as sessions:
        yield PlayResources(
            client=client,
            store=directory_store(server.store),
            settings=Policy(),
            dialect=dialect_of(engine),
            sessions=sessions,
        )
        assert_idle(client)


@dataclass(frozen=True, kw_only=True)
class Held:
    """What the rollouts of this process hold."""

    handles: int
    children: frozenset[int]
    tasks: int
    sessions: int
    """at the session server"""
    files: tuple[str, ...]

    def is_within(self, before: "Held") -> bool:
        same = (self.children, self.sessions, self.files) == (before.children, before.sessions, before.files)
        return same and self.handles <= before.handles and self.tasks <= before.tasks


def held(server: SessionsProcess) -> Held:
    return Held(
        handles=len(list(Path("/proc/self/fd").iterdir())),
        children=children(),
        tasks=len(asyncio.all_tasks()),
        sessions=server.status()["sessions"]["open"],
        files=tuple(files(server.store)),
    )


def recording() -> int:
    """Number of sessions in the memory of this process."""
    gc.collect()
    return sum(isinstance(each, Session) for each in gc.get_objects())


async def cancelled(scene: Scene, playing: "asyncio.Task[Any]", is_there: Callable[[], bool]) -> None:
    await wait_until_async(is_there)
    playing.cancel()
    asyncio.get_running_loop().call_later(0.1, scene.go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await playing


THENS = [in_a_turn, in_a_tool, in_grading, in_line_for_a_grader, in_a_program]
CASES = [("recorded", in_sealing), *((door, then) for door in DOORS for then in THENS)]


@pytest.mark.parametrize(("door", "then"), CASES, ids=lambda it: getattr(it, "__name__", it))
def test_a_cancelled_rollout_releases_everything(
    door: str, then: Then, server: SessionsProcess, script: Script, tmp_path: Path
) -> None:
    scene = Scene(tmp_path, script, threading.Event())

    async def main() -> None:
        async with stage_with(server, script) as stage:
            await play(stage, loaded(DOORS[door](scene, nothing)), 0, attempt_of(then.__name__))
            before = held(server)
            attempt = attempt_of(then.__name__, attempt=2)
            playing = asyncio.create_task(play(stage, loaded(DOORS[door](scene, then)), 0, attempt))
            await cancelled(scene, playing, scene.is_there)
            await wait_until_async(lambda: held(server).is_within(before), what=f"{before}")
        assert door == "agent" or recording() == 0

    run(main, concurrency=1)


def test_a_rollout_of_an_agent_cancelled_at_any_await_leaves_nothing(
    server: SessionsProcess, script: Script, tmp_path: Path
) -> None:
    """Also before its session is created and while it is sealed. The last ones run to completion."""
    scene = Scene(tmp_path, script, threading.Event())

    async def main() -> None:
        ended = 0
        async with stage_with(server, script) as stage:
            await play(stage, loaded(PlaysByUrl(scene, nothing)), 0, attempt_of("anywhere"))
            for number in range(1, 40):
                before = held(server)
                attempt = attempt_of("anywhere", attempt=1 + number)
                playing = cancelled_at(number, play(stage, loaded(PlaysByUrl(scene, nothing)), 0, attempt))
                await asyncio.wait([playing])
                if playing.cancelled():  # polls of the engine's load may hold a connection for a moment
                    await wait_until_async(lambda before=before: held(server).is_within(before))
                ended += not playing.cancelled()
                if ended == 2:
                    break
        assert number > 6

    run(main, concurrency=1)


def test_cancelling_the_scoring_of_a_group_releases_everything(
    server: SessionsProcess, script: Script, tmp_path: Path
) -> None:
    scene = Scene(tmp_path, script, threading.Event())

    class Scores(Plays):
        async def score_group(self, example: Any, rollouts: Sequence[Any]) -> list[float]:
            return await asyncio.gather(
                *(graded(graders.catastrophic_by_name, str(scene.mark), timeout_s=1000) for _ in rollouts)
            )

    async def main() -> None:
        async with stage_with(server, script) as stage:
            environment = loaded(Scores(scene, nothing))
            results = [await play(stage, environment, 0, attempt_of("group", attempt=number)) for number in range(4)]
            before = held(server)
            scoring = asyncio.create_task(score_group(stage.store, environment, 0, results))
            await cancelled(scene, scoring, scene.is_there)
            await wait_until_async(lambda: held(server).is_within(before), what=f"{before}")

    run(main)

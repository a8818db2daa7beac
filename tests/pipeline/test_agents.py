"""Agents that use a URL: their rollouts become batches, and no session, process or file of theirs is left."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from pydantic import SecretStr
from support.engine_clients import attempt_of, files, loaded
from support.pipeline import Pipeline, pipeline_in
from support.processes import alive
from support.session_process import Script, SessionsProcess, running, scripted
from support.stores import directory_store
from support.upstream import ReceivedRequest, Response, answer, user
from support.waiting import wait_until, wait_until_async

from headpond.config.engine import Engine, Policy
from headpond.config.sessions import Sessions
from headpond.engines.dialects import dialect_of
from headpond.engines.http.client import EngineClient
from headpond.environments import AgentPolicy, run_program
from headpond.environments.agent_program import NICENESS
from headpond.environments.builtin.arithmetic_program import AGENT
from headpond.errors import EngineUnreachable, StageError
from headpond.playing.agent_sessions import SessionServers
from headpond.playing.rollout import PlayResources, play
from headpond.store.columns import read_columns

EXAMPLES = Path(__file__).parents[2] / "examples"
KEY = "key of the run"


def test_three_kinds_of_agents_become_batches(tmp_path: Path) -> None:
    assert shutil.which("curl"), "examples/subprocess_agent.py runs curl"
    settings = {"trainer": {"max_steps_ahead": "unlimited"}, "steps": 2}
    with pipeline_in(tmp_path / "pipeline", **settings) as pipeline, sessions_beside(pipeline) as server:
        environments = {"sums": "program", "trivia": "openai_agent:Trivia", "shell": "subprocess_agent:Shell"}
        pipeline.new_run(
            "agents",
            sessions={"urls": ["http://127.0.0.1:1", server.url]},
            batch={"size": 3, "seq_len": 8192},
            **{f"environments.{name}": {"use": use} for name, use in environments.items()},
        )
        cluster = pipeline.cluster
        cluster.rollout_worker(PYTHONPATH=f"{Path(__file__).parents[2]}:{EXAMPLES}")
        cluster.compute_worker()
        result = pipeline.finish(cluster.orchestrator())
        assert result["dead"] == 0
        played = [rollout for manifest in pipeline.manifests.values() for rollout in manifest.plan.rollouts]
        assert {rollout.env for rollout in played} == set(environments)
        assert all(rollout.columns.key.startswith("rollouts/") and rollout.experts for rollout in played)
        status = server.status()
        assert status["sessions"]["open"] == 0
        assert status["counts"]["sealed"] >= len(played)
        assert list((cluster.store / "sessions").rglob("*.safetensors")) == []


@contextmanager
def sessions_beside(pipeline: Pipeline) -> Iterator[SessionsProcess]:
    """A session server that writes to the store of the pipeline's next run, `agents`."""
    host, port = pipeline.engine.address
    with running(
        pipeline.cluster.directory, f"http://{host}:{port}", "--engine-routed-experts", store="agents/store"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with scripted() as script:
        yield script


@pytest.fixture(scope="module")
def server(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionsProcess]:
    with running(tmp_path_factory.mktemp("sessions"), script.server.url, sessions__create_key=KEY) as server:
        yield server


@asynccontextmanager
async def stage_with(server: SessionsProcess, *more_urls: str) -> AsyncIterator[PlayResources]:
    engine = Engine()
    async with EngineClient.open(engine) as client, SessionServers.open(
        Sessions(urls=(*more_urls, server.url), create_key=SecretStr(KEY))
    ) as sessions:  # fmt: skip
        yield PlayResources(
            client=client,
            store=directory_store(server.store),
            settings=Policy(),
            dialect=dialect_of(engine),
            sessions=sessions,
        )


class Chatting:
    """Runs a program that chats, then awaits `then`."""

    external_agent = True

    def __init__(self, then: Any) -> None:
        self.then = then

    async def rollout(self, example: str, policy: AgentPolicy) -> float:
        assert policy.api_key not in repr(policy)
        ended = await run_program([sys.executable, "-I", str(AGENT), "hello"], policy)
        assert ended.output.startswith("answer ")
        await self.then(policy)
        return 1.0


async def nothing(policy: AgentPolicy) -> None:
    pass


def test_a_rollout_is_sealed_into_the_directory_of_its_execution(server: SessionsProcess) -> None:
    async def main() -> None:
        async with stage_with(server, "http://127.0.0.1:1") as stage:
            result = await play(stage, loaded(Chatting(nothing)), 0, attempt_of("sealed"))
        assert result.columns
        assert result.columns.key == "rollouts/run/sealed/1.aa/columns.safetensors"
        assert result.experts
        columns = read_columns(stage.store, result.columns)
        assert (columns.rollout, result.turns) == ("sealed", 2)
        assert columns.turns.begun_at is not None
        assert columns.turns.seconds is not None
        programs = [span for span in columns.spans if span[0] == "program"]
        began, took = programs[0][2:]
        assert (columns.turns.begun_at >= began).all()
        assert float(columns.turns.seconds.sum()) <= took
        assert result.metrics["engine_s"] == pytest.approx(float(columns.turns.seconds.sum()), abs=1e-3)
        stage.store.open(result.experts)

    asyncio.run(main())
    assert server.status()["sessions"]["open"] == 0
    assert [path.name for path in (server.store / "sessions").glob("*/*")] == [".lock"]


def test_the_reply_of_an_agents_rollout_counts_what_the_engine_aborted(server: SessionsProcess, script: Script) -> None:
    aborted: list[ReceivedRequest] = []

    def respond(request: ReceivedRequest) -> Response:
        aborted.append(request)
        choice = json.loads(body := script.body(request))["choices"][0]
        body = answer(request, "half", routed=True, choices=[{**choice, "finish_reason": "abort"}])
        return Response(body=body if len(aborted) == 1 else script.body(request))

    class Aborted(Chatting):
        async def rollout(self, example: str, policy: AgentPolicy) -> float:
            headers = {"Authorization": f"Bearer {policy.api_key}"}
            request, statuses = {"messages": [user("is aborted")]}, list[int]()
            async with ClientSession(headers=headers) as http:
                for _ in range(2):
                    async with http.post(f"{policy.base_url}/chat/completions", json=request) as response:
                        statuses.append(response.status)
            assert statuses == [503, 200]
            return 1.0

    async def main() -> None:
        script.responses["is aborted"] = respond
        async with stage_with(server) as stage:
            result = await play(stage, loaded(Aborted(nothing)), 0, attempt_of("aborted"))
        assert (result.metrics["engine_aborts"], result.turns) == (1, 1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("returned", "reward", "rewards"),
    [(None, 0.5, {"tests": 0.5}), (0.75, 0.75, {"tests": 0.5}), ({"tests": 1.0}, 1.0, {"tests": 1.0})],
)
def test_rewards_that_a_harness_posts_are_the_rollouts(
    server: SessionsProcess, returned: Any, reward: float, rewards: dict[str, float]
) -> None:
    """What the environment returns holds; what was posted besides is added."""
    posted = {"reward": 0.5, "metrics": {"passed": 3.0}, "turn_rewards": [0.0, 1.0], "rewards": {"tests": 0.5}}

    async def post(policy: AgentPolicy) -> None:
        assert policy.control_key not in [*policy.variables.values(), repr(policy)]
        async with (
            ClientSession(headers={"Authorization": f"Bearer {policy.control_key}"}) as http,
            http.post(policy.rewards_url, json=posted) as response,
        ):
            assert response.status == 204

    class Harness(Chatting):
        async def rollout(self, example: str, policy: AgentPolicy) -> Any:
            await super().rollout(example, policy)
            return returned

    async def main() -> None:
        async with stage_with(server) as stage:
            result = await play(stage, loaded(Harness(post)), 0, attempt_of(f"posted-{reward}".replace(".", "-")))
            assert result.columns
            turns = read_columns(stage.store, result.columns).turns
        assert (result.reward, result.rewards, result.metrics["passed"]) == (reward, rewards, 3.0)
        assert turns.reward.tolist() == [0.0, 1.0]

    asyncio.run(main())


def test_an_environment_without_a_score_and_a_posted_one_has_failed(server: SessionsProcess) -> None:
    class Silent(Chatting):
        async def rollout(self, example: str, policy: AgentPolicy) -> Any:
            await super().rollout(example, policy)

    async def main() -> None:
        async with stage_with(server) as stage:
            with pytest.raises(StageError, match="no reward was posted"):
                await play(stage, loaded(Silent(nothing)), 0, attempt_of("silent"))

    asyncio.run(main())


def test_cancelling_a_rollout_ends_its_session_and_all_processes_of_its_agent(
    server: SessionsProcess, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    sleeping = f"sleep 1000 & echo $! $$ > {pids}; wait"

    async def main() -> None:
        async def sleep(policy: AgentPolicy) -> None:
            await run_program(["/bin/sh", "-c", sleeping], policy)

        async with stage_with(server) as stage:
            playing = asyncio.create_task(play(stage, loaded(Chatting(sleep)), 0, attempt_of("cancelled")))
            await wait_until_async(lambda: pids.exists() and len(pids.read_text().split()) == 2, what="the agent")
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing

    asyncio.run(main())
    for pid in map(int, pids.read_text().split()):
        wait_until(lambda pid=pid: not alive(pid), what="the agent's process to be gone")
    assert server.status()["sessions"]["open"] == 0
    assert not any("cancelled" in name for name in files(server.store))
    assert not (server.store / "rollouts" / "run" / "cancelled").exists()


def test_an_agent_that_times_out_is_a_policy_failure_with_its_turns(server: SessionsProcess) -> None:
    async def main() -> None:
        async with stage_with(server) as stage:
            result = await play(stage, loaded(Slow()), 0, attempt_of("late", timeout_s=3.0))
        assert result.policy_error == "timeout: the rollout took longer than 3 s"
        assert result.columns
        assert not read_columns(stage.store, result.columns).loss_mask.any()

    asyncio.run(main())


class Slow:
    """Chats from this process, in a few milliseconds, then never returns."""

    external_agent = True

    async def rollout(self, example: str, policy: AgentPolicy) -> float:
        body, headers = (
            {"messages": [{"role": "user", "content": "hello"}]},
            {"Authorization": f"Bearer {policy.api_key}"},
        )
        url = f"{policy.base_url}/chat/completions"
        async with ClientSession(headers=headers) as http, http.post(url, json=body) as response:
            assert response.status == 200
        await asyncio.Event().wait()
        return 0.0


class Silent:
    external_agent = True

    async def rollout(self, example: str, policy: AgentPolicy) -> float:
        return 0.25


def test_an_agent_without_a_chat_has_a_result_without_files(server: SessionsProcess) -> None:
    async def main() -> None:
        async with stage_with(server) as stage:
            result = await play(stage, loaded(Silent()), 0, attempt_of("silent"))
        assert (result.reward, result.columns) == (0.25, None)
        assert result.policy_error

    asyncio.run(main())
    assert server.status()["sessions"]["open"] == 0


def test_an_environment_that_raises_leaves_no_session(server: SessionsProcess) -> None:
    async def main() -> None:
        async def broken(policy: AgentPolicy) -> None:
            raise KeyError("a bug")

        async with stage_with(server) as stage:
            with pytest.raises(StageError, match="KeyError: 'a bug'"):
                await play(stage, loaded(Chatting(broken)), 0, attempt_of("broken"))

    asyncio.run(main())
    assert server.status()["sessions"]["open"] == 0
    assert not (server.store / "rollouts" / "run" / "broken").exists()


def test_unreachable_session_servers_raise_engine_unreachable(server: SessionsProcess) -> None:
    async def main() -> None:
        async with SessionServers.open(Sessions(urls=("http://127.0.0.1:1", "http://127.0.0.1:2"))) as servers:
            with pytest.raises(EngineUnreachable, match=r"no session server accepts a session \(http://127.0.0.1:1: "):
                async with servers.session({}):
                    pass

    asyncio.run(main())


def test_a_program_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    starter = (
        "import asyncio, sys; from headpond.environments import AgentPolicy, run_program; asyncio.run(run_program("
        f"['/bin/sh', '-c', 'echo $$ > {pid_file}; exec sleep 1000'], AgentPolicy(base_url='', api_key='')))"
    )

    async def main() -> int:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", starter, cwd=EXAMPLES.parent)
        await wait_until_async(lambda: pid_file.exists() and pid_file.read_text().strip(), what="the program")
        process.kill()
        await process.wait()
        return int(pid_file.read_text())

    pid = asyncio.run(main())
    wait_until(lambda: not alive(pid), what="the program to be gone")
    assert os.getpid() != pid


def run_here(script: str) -> str:
    """Output of a shell script that runs as an agent."""
    policy = AgentPolicy(base_url="http://there/v1", api_key="key")
    return asyncio.run(run_program(["/bin/sh", "-c", script], policy)).output


def test_an_agent_gets_its_own_key_and_no_headpond_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADPOND_REDIS_URL", "redis://:hunter2@127.0.0.1/0")
    monkeypatch.setenv("HEADPOND_ENGINE__API_KEY", "hunter3")
    output = run_here("env")
    assert "OPENAI_BASE_URL=http://there/v1" in output
    assert "OPENAI_API_KEY=key" in output
    assert "OPENAI_MODEL=policy" in output
    assert "HEADPOND_" not in output
    assert "hunter" not in output


def test_a_program_ends_while_its_children_still_run() -> None:
    assert run_here("sleep 1000 & setsid sleep 5 & echo done") == "done\n"


def test_the_end_of_long_output_is_kept() -> None:
    output = run_here("head -c 3000000 /dev/zero | tr '\\0' x; echo end")
    assert (len(output), output[-5:]) == (1 << 20, "xend\n")


def test_a_program_runs_with_lower_priority() -> None:
    assert int(run_here("nice")) == min(os.nice(0) + NICENESS, 19)  # Linux's maximum is 19

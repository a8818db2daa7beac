"""The demo's agent, against a server that cannot answer at once."""

import asyncio

import pytest
from aiohttp import web

from examples import small_tasks
from examples.small_tasks import Dictation
from headpond.environments import AgentPolicy
from headpond.errors import InfrastructureFailure


async def play(statuses: list[int], answers: list[str]) -> float:
    async def chat(_: web.Request) -> web.Response:
        if statuses and (status := statuses.pop(0)) != 200:
            return web.Response(status=status)
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": answers.pop(0)}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return await Dictation().rollout(("12", "34"), AgentPolicy(base_url=url, api_key="key"))
    finally:
        await runner.cleanup()


def test_the_agent_asks_again_while_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_tasks, "FIRST_PAUSE_S", 0.0)
    assert asyncio.run(play([502, 502, 200, 503], ["12", "31"])) == 0.75


def test_a_server_that_never_answers_is_a_failure_of_the_infrastructure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_tasks, "FIRST_PAUSE_S", 0.0)
    with pytest.raises(InfrastructureFailure, match="could not answer, 6 times"):
        asyncio.run(play([502] * small_tasks.ATTEMPTS, []))

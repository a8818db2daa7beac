"""Model and sampling that a session forces, and chats that are left out of training."""

from pathlib import Path
from typing import Any

import pytest
from support.api_clients import CLIENTS, ApiClient
from support.session_process import Agent, Script, SessionsProcess, running
from support.upstream import user

TITLE = "Write a title"
RULES = """
[sessions.leave_out.titles]
system = "^Write a title"
[sessions.leave_out.small]
model = "haiku"
user = "summar(y|ize)"
"""


def send(agent: Agent, client: ApiClient, text: str, *, system: str = "", headers: Any = None, **fields: Any) -> Any:
    body = client.request(client.items([user(text)]), system=system) | fields
    return agent.request("POST", client.path, body, **(headers or {}))


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_session_forces_model_and_sampling(sessions: SessionsProcess, script: Script, client: ApiClient) -> None:
    forced = {"temperature": 1.0, "max_tokens": 64, "top_p": None}
    agent = sessions.agent(model="policy", forced=forced)
    fields = {"model": "gpt-4o-mini", "temperature": 0.1, "top_p": 0.5}
    fields |= {"max_output_tokens": 32000} if client.name == "responses" else {"max_completion_tokens": 32000}
    assert send(agent, client, "forced", **fields).status == 200
    sent = script.received("forced")[-1].body
    assert (sent["model"], sent["temperature"], sent["max_tokens"]) == ("policy", 1.0, 64)
    assert not {"top_p", "max_completion_tokens"} & sent.keys()


def test_the_configuration_forces_too(script: Script, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[sessions]\nmodel = "policy"\nforced = {temperature = 0.7, max_tokens = 9}')
    with running(tmp_path, script.server.url, str(config)) as process:
        agent, special = process.agent(), process.agent(forced={"max_tokens": 11})
        agent.chat("by configuration", model="gpt-4o-mini", max_tokens=32000)
        sent = script.received("by configuration")[-1].body
        assert (sent["model"], sent["temperature"], sent["max_tokens"]) == ("policy", 0.7, 9)
        special.chat("by session")
        assert script.received("by session")[-1].body["max_tokens"] == 11


def test_what_cannot_be_forced_is_refused(sessions: SessionsProcess) -> None:
    response = sessions.request("POST", "/sessions", {"forced": {"n": 2}})
    assert (response.status, response.error) == (400, "forced: n cannot be forced; remove it")


@pytest.fixture(scope="module", params=["open", "linear"])
def ruled(request: pytest.FixtureRequest, script: Script, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("ruled")
    (directory / "run.toml").write_text(RULES)
    with running(directory, script.server.url, str(directory / "run.toml"), "--mode", request.param) as process:
        yield process


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_chats_that_are_not_the_task_are_answered_and_not_trained(ruled: SessionsProcess, client: ApiClient) -> None:
    agent, before = ruled.agent(), ruled.status()["chats"]["left_out"]
    agent.talk("task")
    left_out: list[dict[str, Any]] = [
        {"text": "x", "system": TITLE},
        {"text": "summarize", "model": "claude-haiku"},
        {"text": "y", "headers": {"x_headpond_train": "false"}},
    ]
    for fields in left_out:
        response = send(agent, client, **fields)
        assert response.status == 200, response.body
        assert b"answer" in response.body
    agent.talk("goes on")
    shown = agent.request("GET").json
    assert (len(shown["records"]), len(shown["metadata"]["left_out"])) == (2, 3)
    assert ruled.status()["chats"]["left_out"] == before + 3
    assert ruled.text.count(f"session={agent.id} by=titles") == 1
    sealed = agent.request("POST", "/seal").json
    assert (len(sealed["sample_lengths"]), sealed["metrics"]["turns"], sealed["metrics"]["breaks"]) == (1, 2, 0)


def test_a_rule_needs_all_its_patterns(ruled: SessionsProcess) -> None:
    agent = ruled.agent()
    agent.chat("summarize", model="policy")
    assert agent.turns() == 1


def test_a_session_with_nothing_but_such_chats_has_nothing_to_train(ruled: SessionsProcess) -> None:
    agent = ruled.agent()
    agent.request("POST", "/v1/chat/completions", {"messages": [user("x")]}, x_headpond_train="false")
    response = agent.request("POST", "/seal")
    assert response.status == 422
    assert "1 chats were left out" in response.error
    refused = agent.request("POST", "/v1/chat/completions", {"messages": [user("x")]}, x_headpond_train="maybe")
    assert refused.status == 400


def test_chats_that_were_left_out_are_kept_over_a_kill(script: Script, tmp_path: Path) -> None:
    port = {"sessions__instance_id": "1" * 32}
    with running(tmp_path, script.server.url, **port) as server:
        agent = server.agent()
        agent.talk("one")
        agent.request("POST", "/v1/chat/completions", {"messages": [user("aside")]}, x_headpond_train="false")
        agent.talk("two")
        server.kill()
    with running(tmp_path, script.server.url, **port) as server:
        agent.server = server
        agent.talk("three")
        shown = agent.request("GET").json
        assert (len(shown["records"]), len(shown["metadata"]["left_out"])) == (3, 1)
        assert len(agent.request("POST", "/seal").json["sample_lengths"]) == 1

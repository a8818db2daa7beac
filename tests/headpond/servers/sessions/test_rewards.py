"""Rewards from outside, and the secret that they, sealing and deleting need."""

from pathlib import Path
from typing import Any

import pytest
from support.session_process import CHAT, Agent, Script, SessionsProcess, running
from support.stores import directory_store
from support.upstream import user

from headpond.store import BlobRef
from headpond.store.columns import read_columns

ONE = {"reward": 0.5, "rewards": {"tests": 1.0}, "metrics": {"passed": 3.0}}
OTHER = {"rewards": {"style": 0.25}, "turn_rewards": [0.0, 1.0], "metrics": {"passed": 4.0}}
BOTH = {
    "reward": 0.5,
    "rewards": {"tests": 1.0, "style": 0.25},
    "turn_rewards": [0.0, 1.0],
    "metrics": {"passed": 4.0},
}


def test_posted_rewards_are_sealed_with_the_session(agent: Agent, sessions: SessionsProcess) -> None:
    for text in ("one", "two"):
        agent.talk(text)
    assert agent.request("POST", "/rewards", ONE).status == 204
    assert agent.request("POST", "/rewards", OTHER).status == 204
    sealed = agent.request("POST", "/seal").json
    assert sealed["score"] == BOTH
    columns = read_columns(directory_store(sessions.store), BlobRef(**sealed["columns"]))
    assert columns.turns.reward.tolist() == [0.0, 1.0]
    assert agent.request("POST", "/rewards", ONE).status == 404


def test_posted_rewards_survive_a_kill(script: Script, tmp_path: Path) -> None:
    name = {"sessions__instance_id": "4" * 32}
    with running(tmp_path, script.server.url, **name) as server:
        agent = server.agent()
        agent.talk("hello")
        assert agent.request("POST", "/rewards", ONE).status == 204
        server.kill()
    with running(tmp_path, script.server.url, **name) as server:
        agent.server = server
        assert agent.request("POST", "/seal").json["score"] == ONE
        assert agent.request("DELETE").status == 204
        assert not list(server.store.rglob(".score.json"))


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        ({"reward": "high"}, "Expected `float | null`"),
        ({"rewards": {"": 1.0}}, "not a valid name"),
        ({"metrics": {str(number): 1.0 for number in range(100)}}, "the limit is"),
        ({"turn_rewards": [1.0, 2.0]}, "the session has 1 turns"),
        ({"prize": 1.0}, "unknown field"),
        (b"[", "cannot be read"),
    ],
)
def test_an_invalid_score_is_refused(agent: Agent, score: Any, reason: str) -> None:
    agent.talk("hello")
    response = agent.request("POST", "/rewards", score)
    assert (response.status, reason in response.error) == (400, True), response.body
    assert agent.request("POST", "/seal").json["score"] == {}


def test_a_reward_that_is_missing_for_a_turn_is_refused_at_sealing(agent: Agent) -> None:
    agent.talk("one")
    assert agent.request("POST", "/rewards", {"turn_rewards": [1.0]}).status == 204
    agent.talk("two")
    response = agent.request("POST", "/seal")
    assert (response.status, "1 rewards for 2 turns" in response.error) == (400, True)
    assert agent.request("POST", "/seal", {"turn_rewards": [0.0, 1.0]}).status == 200


def test_creating_a_session_needs_the_key_if_one_is_set(script: Script, tmp_path: Path) -> None:
    """Otherwise an agent could name versions that no replica has, and stop every other session."""
    orders = {"run": "r", "sequence": 2**31 - 1, "policy_version": 2**31 - 1, "least_version": 2**31 - 1}
    with running(tmp_path, script.server.url, sessions__create_key="key of the run") as server:
        created = server.request("POST", "/sessions", {}, {"Authorization": "Bearer key of the run"}).json
        for secret in ("", created["secret"], created["control_secret"]):
            response = server.request("POST", "/sessions", orders, {"Authorization": f"Bearer {secret}"})
            assert (response.status, "sessions.create_key" in response.error) == (401, True)
        path = f"/sessions/{created['session_id']}{CHAT}"
        assert server.request("POST", path, {"messages": [user("hello")]}).status == 200
        assert "key of the run" not in server.text


@pytest.mark.parametrize(("method", "path"), [("POST", "/seal"), ("POST", "/rewards"), ("DELETE", "")])
def test_an_agent_cannot_end_or_reward_its_session(agent: Agent, method: str, path: str) -> None:
    """On loopback too, where chats need no secret."""
    agent.talk("hello")
    for headers in ({}, {"Authorization": f"Bearer {agent.secret}"}):
        response = agent.server.request(method, agent.path + path, {}, headers)
        assert (response.status, "control secret" in response.error) == (401, True)
    assert agent.server.request("POST", agent.path + CHAT, {"messages": agent.messages}).status in (200, 400)

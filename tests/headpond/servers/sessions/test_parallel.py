"""Several chats of one session in flight: sub-agents, samples of one prompt, chats that wait."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.session_process import CHAT, Agent, HttpResponse, Script, SessionsProcess, running
from support.stores import directory_store
from support.upstream import Response, user
from support.waiting import wait_until

from headpond.store import BlobRef
from headpond.store.columns import Columns, read_columns


@pytest.fixture(scope="module", params=["open", "linear"])
def sessions(
    request: pytest.FixtureRequest, script: Script, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SessionsProcess]:
    directory = tmp_path_factory.mktemp(request.param)
    with running(directory, script.server.url, "--mode", request.param, sessions__concurrency="3") as process:
        yield process


def chat(agent: Agent, messages: list[Any], branch: str = "", **headers: str) -> HttpResponse:
    path = f"/branch/{branch}{CHAT}" if branch else CHAT
    return agent.request("POST", path, {"messages": messages}, **headers)


def held(script: Script, text: str) -> threading.Event:
    """The upstream answers requests that end with `text` when the event is set."""
    answered = threading.Event()
    script.responses[text] = lambda request: Response(body=script.body(request), waits_for=answered)
    return answered


def sealed(agent: Agent) -> tuple[Any, Columns]:
    result = agent.request("POST", "/seal").json
    return result, read_columns(directory_store(agent.server.store), BlobRef(**result["columns"]))


@pytest.mark.parametrize("first", ["one", "two"])
def test_sub_agents_are_samples_of_their_own_whichever_is_answered_first(
    agent: Agent, script: Script, first: str
) -> None:
    start = agent.talk("start").json["choices"][0]["message"]
    tasks = {name: [user("start"), start, user(name)] for name in ("one", "two")}
    answered = {name: held(script, name) for name in tasks}
    with ThreadPoolExecutor(2) as pool:
        chats = {}
        for name, messages in tasks.items():
            chats[name] = pool.submit(chat, agent, messages, name)
            wait_until(lambda name=name: script.received(name))
        assert chat(agent, [user("start"), start, user("main")]).status == 200
        for name in sorted(tasks, key=lambda name: name != first):
            answered[name].set()
            assert chats[name].result().status == 200
    result, columns = sealed(agent)
    script.server.received.clear()
    assert (result["metrics"]["samples"], result["metrics"]["breaks"], result["turns"]) == (3, 1, 4)
    assert [columns.agent_of(number) for number in range(3)] == ["", "two", ""]
    assert [columns.parent_of(number) for number in range(3)] == [-1, 0, 0]
    assert [columns.turns.words["agent"][agent] for agent in columns.turns.agent] == ["", "one", "two", ""]
    trained = [int(columns.loss_mask[columns.sample(number)].sum()) for number in range(3)]
    sampled = [len(f"answer 3 to {name}") for name in ("one", "two", "main")]
    assert trained == [len("answer 1 to start") + sampled[0], *sampled[1:]], "the shared beginning is trained once"


def test_agents_are_known_by_their_own_headers(agent: Agent) -> None:
    for id in ("7f3a", "91bc", "7f3a"):
        assert chat(agent, [user(f"task {id}")], x_claude_code_agent_id=id).status == 200
    assert chat(agent, [user("thread")], thread_id="t1").status == 200
    result, columns = sealed(agent)
    assert result["agents"].keys() == {"agent-1", "agent-2", "agent-3"}
    assert [columns.agent_of(number) for number in range(4)] == ["agent-1", "agent-2", "agent-1", "agent-3"]
    assert result["metrics"]["breaks"] == 1


def test_one_prompt_sampled_several_times_at_once_is_several_turns(agent: Agent, script: Script) -> None:
    answered = held(script, "sample")
    with ThreadPoolExecutor(3) as pool:
        chats = [pool.submit(chat, agent, [user("sample")]) for _ in range(3)]
        wait_until(lambda: len(script.received("sample")) == 3)
        assert (refused := chat(agent, [user("too many")])).status == 409
        assert "in-flight" in str(refused.json)
        answered.set()
        assert [each.result().status for each in chats] == [200] * 3
    script.server.received.clear()
    result, columns = sealed(agent)
    assert (result["turns"], len(result["sample_lengths"])) == (3, 3)
    assert [columns.parent_of(number) for number in range(3)] == [-1, 0, 1]


def test_a_branch_reaches_only_the_paths_of_its_session(agent: Agent) -> None:
    assert agent.request("GET", "/branch/a/v1/models").json["path"] == "/v1/models"
    for path in ("/branch/a/v1/other", "/branch//v1/models", "/branch/a b/v1/models", "/branch/a/branch/b/v1/models"):
        assert agent.request("GET", path.replace(" ", "%20")).status == 404


def test_chats_can_wait_for_their_turn(script: Script, tmp_path: Any) -> None:
    with running(tmp_path, script.server.url, sessions__when_busy="queue") as server, ThreadPoolExecutor(4) as pool:
        agent, answered = server.agent(), held(script, "waits")
        chats = [pool.submit(chat, agent, [user("waits")])]
        wait_until(lambda: script.received("waits"))
        chats += [pool.submit(chat, agent, [user(f"behind {number}")]) for number in range(3)]
        answered.set()
        assert [each.result().status for each in chats] == [200] * 4
        assert script.server.most_answering >= 1
        assert sealed(agent)[0]["turns"] == 4
    script.server.received.clear()

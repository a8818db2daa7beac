"""Agents' frameworks return an assistant's message a little differently than it was sent: the recorded one goes on."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.session_process import Agent, Script, SessionsProcess, running
from support.upstream import Message, ReceivedRequest, Response, answer, calling, tool_call, user

TURNS = 5
Change = Callable[[Message], Message]


def thoughtful(request: ReceivedRequest) -> Response:
    """A model that thinks, says something and calls a tool."""
    number = len(request.messages)
    call = tool_call("look", f'{{"at": {number}, "deep": {{"x":1.0}}}}', id=f"c{number}")
    message = {**calling(call), "content": f"Step {number}.\n\nLook: ", "reasoning_content": f"hm {number} "}
    return Response(body=answer(request, message, routed=True))


def serialised_anew(message: Message) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(json.loads(call["function"]["arguments"]))}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def dropped(message: Message) -> Message:
    return {name: message[name] for name in ("role", "content", "tool_calls")}


FRAMEWORKS: dict[str, Change] = {
    "thoughts dropped": dropped,
    "thoughts renamed": lambda message: {**dropped(message), "reasoning": message["reasoning_content"]},
    "arguments serialised anew": serialised_anew,
    "content as parts": lambda message: {
        **message,
        "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": message["content"].strip()}],
    },
    "text beside calls dropped": lambda message: {**dropped(message), "content": None},
    "call ids of its own": lambda message: {
        **message,
        "tool_calls": [{**call, "id": f"toolu_{call['id']}", "index": 0} for call in message["tool_calls"]],
    },
}


@pytest.fixture(scope="module")
def linear(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionsProcess]:
    with running(tmp_path_factory.mktemp("linear"), script.server.url, "--mode", "linear") as process:
        yield process


def play(agent: Agent, script: Script, change: Change) -> list[Message]:
    """The messages as the agent has them after its conversation."""
    script.responses["result"] = script.responses["begin"] = thoughtful
    messages = [user("begin")]
    for _ in range(TURNS):
        response = agent.chat(messages)
        assert response.status == 200, response.body
        echo = change(response.json["choices"][0]["message"])
        id = echo["tool_calls"][0]["id"]
        messages += [echo, {"role": "tool", "tool_call_id": id, "content": "result"}]
    return messages


@pytest.mark.parametrize("mode", ["linear", "open"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_changed_echo_makes_no_break(
    sessions: SessionsProcess, linear: SessionsProcess, script: Script, framework: str, mode: str
) -> None:
    server = linear if mode == "linear" else sessions
    agent, before = server.agent(), server.status()["chats"]["repaired_echoes"]
    play(agent, script, FRAMEWORKS[framework])
    recorded = [record["response"]["choices"][0]["message"] for record in agent.request("GET").json["records"]]
    forwarded = script.server.received[-1].messages
    assert [message for message in forwarded if message["role"] == "assistant"] == recorded[:-1]
    assert [message["tool_call_id"] for message in forwarded[2::2]] == [
        message["tool_calls"][0]["id"] for message in recorded[:-1]
    ]
    assert agent.request("GET").json["metadata"]["repaired_echoes"] == TURNS - 1
    assert server.status()["chats"]["repaired_echoes"] == before + TURNS - 1
    sealed = agent.request("POST", "/seal").json
    assert (len(sealed["sample_lengths"]), sealed["metrics"]["breaks"]) == (1, 0)
    assert sealed["metrics"]["repaired_echoes"] == TURNS - 1


def test_an_unchanged_echo_is_forwarded_as_it_came(agent: Agent, script: Script) -> None:
    messages = play(agent, script, lambda message: {**message, "added": 1})
    assert script.server.received[-1].messages == messages[:-2]
    assert agent.request("POST", "/seal").json["metrics"]["repaired_echoes"] == 0


def test_with_exact_echoes_every_changed_one_breaks(script: Script, tmp_path: Any) -> None:
    with running(tmp_path, script.server.url, sessions__echo="exact") as server:
        agent = server.agent()
        play(agent, script, dropped)
        sealed = agent.request("POST", "/seal").json
        assert (len(sealed["sample_lengths"]), sealed["metrics"]["breaks"]) == (TURNS, TURNS - 1)


def test_an_edited_answer_starts_a_sample(agent: Agent, script: Script) -> None:
    play(agent, script, lambda message: {**message, "content": message["content"] + "!"})
    sealed = agent.request("POST", "/seal").json
    assert (len(sealed["sample_lengths"]), sealed["metrics"]["repaired_echoes"]) == (TURNS, 0)


def test_echoes_are_recognised_after_a_restart(script: Script, tmp_path: Any) -> None:
    port = {"sessions__instance_id": "0" * 32}
    with running(tmp_path, script.server.url, **port) as server:
        agent = server.agent()
        messages = play(agent, script, dropped)
        server.kill()
    with running(tmp_path, script.server.url, **port) as server:
        agent.server = server
        assert agent.request("GET").json["metadata"]["repaired_echoes"] == TURNS - 1
        assert agent.chat(messages).status == 200
        sealed = agent.request("POST", "/seal").json
        assert (len(sealed["sample_lengths"]), sealed["metrics"]["repaired_echoes"]) == (1, TURNS)

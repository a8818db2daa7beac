import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.session_process import Agent, Script, SessionsProcess, running
from support.stores import directory_store
from support.upstream import Response, answer, calling, tool_call, user

from headpond.servers.sessions.error_responses import CONTEXT_LENGTH
from headpond.store import BlobRef
from headpond.store.columns import read_columns

LIMITS = {"policy__max_turns": "8", "policy__max_seq_len": "400", "policy__max_samples": "5"}


@pytest.fixture(scope="module")
def linear(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionsProcess]:
    directory = tmp_path_factory.mktemp("linear")
    with running(directory, script.server.url, "--mode", "linear", **LIMITS) as process:
        yield process


@pytest.fixture
def strict(linear: SessionsProcess) -> Agent:
    return linear.agent()


def recorded_answers(agent: Agent) -> list[str]:
    """The recorded completions, without discarded ones."""
    return [record["response"]["choices"][0]["message"]["content"] for record in agent.request("GET").json["records"]]


def test_a_continued_conversation_is_one_sample(strict: Agent) -> None:
    for text in ("one", "two", "three"):
        strict.talk(text)
    assert recorded_answers(strict) == ["answer 1 to one", "answer 3 to two", "answer 5 to three"]
    assert len(strict.request("POST", "/seal").json["sample_lengths"]) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"content": "other words"},
        {"content": None},
        {"role": "user"},
        {"tool_calls": [tool_call("f", {})]},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_changed_history_is_refused_without_side_effects(
    strict: Agent, script: Script, changed: dict[str, Any]
) -> None:
    strict.talk("one")
    strict.talk("two")
    strict.talk("three")
    before, received = strict.request("GET").body, len(script.server.received)
    past = [*strict.messages]
    past[1] = {**past[1], **changed}
    response = strict.chat([*past, user("four")])
    assert response.status == 400
    assert "one generated message" in response.error
    assert strict.request("GET").body == before
    assert len(script.server.received) == received
    strict.talk("four")


def test_empty_fields_of_a_message_are_ignored(strict: Agent, script: Script) -> None:
    script.responses["call"] = lambda request: Response(body=answer(request, calling(tool_call("add", {"a": 1}))))
    strict.talk("call")
    for nothing in (None, "", []):
        echo = {
            **calling(tool_call("add", {"a": 1})),
            "content": nothing,
            "reasoning_content": nothing,
            "refusal": None,
        }
        messages = [user("call"), echo, {"role": "tool", "tool_call_id": "c1", "content": "2"}]
        assert strict.chat(messages).status == 200
    assert len(recorded_answers(strict)) == 2


@pytest.mark.parametrize("role", ["system", "assistant", "developer"])
def test_only_some_roles_may_be_appended(strict: Agent, role: str) -> None:
    strict.talk("one")
    response = strict.chat([*strict.messages, {"role": role, "content": "x"}])
    assert response.status == 400
    assert re.match(rf"messages\[2\] .*{role!r}: only tool, user ", response.error)
    response = strict.chat(strict.messages)
    assert (response.status, "appends nothing" in response.error) == (400, True)


def test_one_completion_may_be_discarded(strict: Agent) -> None:
    strict.talk("one")
    strict.talk("two")
    again = [*strict.messages[:2], user("two, again")]
    response = strict.chat(again)
    assert response.content == "answer 3 to two, again"
    assert recorded_answers(strict) == ["answer 1 to one", "answer 3 to two, again"]
    response = strict.chat([*strict.messages, user("after the discarded completion")])
    assert response.status == 400
    again += [last_message(strict), user("three")]
    assert strict.chat(again).status == 200
    response = strict.chat([user("one, again")])
    assert (response.status, "at most one" in response.error) == (400, True)
    assert len(recorded_answers(strict)) == 3
    assert len(strict.request("POST", "/seal").json["sample_lengths"]) == 2


def last_message(agent: Agent) -> Any:
    return agent.request("GET").json["records"][-1]["response"]["choices"][0]["message"]


def test_a_clients_retry_is_not_refused(strict: Agent) -> None:
    for _ in range(3):
        assert strict.chat("one").content == "answer 1 to one"
    assert recorded_answers(strict) == ["answer 1 to one"]
    strict.messages = [user("one"), last_message(strict)]
    strict.talk("two")
    assert strict.chat([*strict.messages[:2], user("two")]).status == 200
    assert len(recorded_answers(strict)) == 2


def test_the_index_of_a_streamed_call_is_not_compared(strict: Agent, script: Script) -> None:
    script.responses["call"] = lambda request: Response(body=answer(request, calling(tool_call("add", {"a": 1}))))
    assert strict.chat("call", stream=True).status == 200
    echo = calling({"index": 0, **tool_call("add", {"a": 1})})
    assert strict.chat([user("call"), echo, {"role": "tool", "tool_call_id": "c1", "content": "1"}]).status == 200


def test_turns_are_limited(strict: Agent) -> None:
    for number in range(8):
        strict.talk(f"{number}")
    response = strict.chat([*strict.messages, user("one more")])
    assert response.status == 400
    assert re.fullmatch(rf"{CONTEXT_LENGTH}: turn limit: .*8 turns \(policy\.max_turns\)", response.error)
    assert strict.request("POST", "/seal").json["turns"] == 8


def test_a_context_that_is_full_ends_the_conversation(strict: Agent) -> None:
    strict.talk("x" * 390)
    response = strict.chat([*strict.messages, user("and?")])
    assert response.status == 400
    assert re.match(rf"{CONTEXT_LENGTH}: .*policy\.max_seq_len \(400\)", response.error)
    sealed = strict.request("POST", "/seal").json
    assert (sealed["truncated"], sealed["sample_lengths"]) == (True, [400])


@pytest.fixture(scope="module")
def free(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionsProcess]:
    with running(tmp_path_factory.mktemp("open"), script.server.url, **LIMITS) as process:
        yield process


def test_a_differing_echo_of_a_full_context_is_refused_too(free: SessionsProcess) -> None:
    agent = free.agent()
    agent.talk("x" * 390)
    other = [agent.messages[0], {"role": "assistant", "content": "other words"}, user("and?")]
    for _ in range(2):
        response = agent.chat(other)
        assert (response.status, response.error) == (
            400,
            f"{CONTEXT_LENGTH}: the prompt has more than 400 tokens (policy.max_seq_len)",
        )
        assert response.json["error"]["code"] == "context_length_exceeded"
    sealed = agent.request("POST", "/seal").json
    assert (sealed["truncated"], sealed["sample_lengths"]) == (True, [400])


def test_a_first_prompt_beyond_the_context_is_refused_and_recorded_without_loss(free: SessionsProcess) -> None:
    agent = free.agent()
    assert agent.chat("x" * 500).status == 400
    sealed = agent.request("POST", "/seal").json
    assert (sealed["sample_lengths"], sealed["completion_tokens"]) == ([400], 0)


def test_in_mode_open_a_conversation_may_diverge(free: SessionsProcess) -> None:
    agent = free.agent()
    agent.talk("one")
    agent.talk("two")
    assert agent.chat([user("a sub-agent")]).status == 200
    assert agent.chat([{"role": "system", "content": "compacted"}, user("three")]).status == 200
    agent.talk("three")
    assert len(recorded_answers(agent)) == 5
    assert len(agent.request("POST", "/seal").json["sample_lengths"]) == 3


def test_samples_are_limited(free: SessionsProcess) -> None:
    agent = free.agent()
    for number in range(5):
        assert agent.chat(f"another {number}").status == 200
    response = agent.chat("one too many")
    assert (response.status, "5 samples are allowed" in response.error) == (400, True)
    assert agent.request("POST", "/seal").json["turns"] == 5


def test_sampling_is_recorded_with_the_turns(linear: SessionsProcess, strict: Agent) -> None:
    strict.chat("plain")
    strict.chat("plain", temperature=0, top_p=0.5, top_k=None)
    columns = read_columns(directory_store(linear.store), BlobRef(**strict.request("POST", "/seal").json["columns"]))
    assert columns.turns.temperature.tolist() == [1.0, 0.0]
    assert [columns.turns.words["sampling"][word] for word in columns.turns.sampling] == ["{}", '{"top_p":0.5}']

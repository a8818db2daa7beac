"""Which messages of a request are recorded answers, whatever an agent's framework made of them."""

import json
from typing import Any

import pytest
from support.conversations import user

from headpond.errors import BadRequest
from headpond.recording.conversation import Conversation, Mode
from headpond.recording.echoes import Echo, restored


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def conversation(mode: Mode, echo: Echo = Echo.RECOGNISED) -> Conversation:
    return Conversation(mode=mode, append_roles=frozenset({"user", "tool"}), echo=echo)


def record(recorded: Conversation, *turns: tuple[list[dict[str, Any]], dict[str, Any]]) -> Conversation:
    for messages, answer in turns:
        recorded.commit(recorded.checkpoint_after(recorded.prepare(messages), answer))
    return recorded


def call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    return {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


ARGUMENTS = '{"path": "a/b", "lines": [1, 2.0], "deep": {"x": null}}'
ANSWER = assistant(
    "First,\n  look at it. ", reasoning_content="hm, what is there?", tool_calls=[call("read", ARGUMENTS)]
)
AGAIN = json.dumps({"deep": {"x": None}, "lines": [1.0, 2], "path": "a/b"}, separators=(",", ":"))
THOUGHT = {"type": "thinking", "thinking": "hm, what is there?", "signature": "x"}
TEXT = {"type": "text", "text": "First, look at it."}
CALLS = ANSWER["tool_calls"]

ECHOES = {
    "thoughts dropped": assistant(ANSWER["content"], tool_calls=CALLS),
    "thoughts renamed": assistant(ANSWER["content"], reasoning="hm, what is there?", tool_calls=CALLS),
    "thoughts edited": assistant(ANSWER["content"], reasoning_content="...", tool_calls=CALLS),
    "thoughts as a part": assistant([THOUGHT, TEXT], tool_calls=CALLS),
    "thoughts in the text": assistant("<think>hm</think>\n\nFirst, look at it.", tool_calls=CALLS),
    "thinking blocks": assistant(ANSWER["content"], thinking_blocks=[THOUGHT], tool_calls=CALLS),
    "white space": assistant("First, look at it.", tool_calls=CALLS),
    "text parts": assistant([TEXT], tool_calls=CALLS),
    "two text parts": assistant([{"type": "text", "text": "First, "}, {"type": "text", "text": "look at it."}], tool_calls=CALLS),  # noqa: E501
    "arguments serialised anew": assistant(ANSWER["content"], tool_calls=[call("read", AGAIN)]),
    "arguments as an object": assistant(ANSWER["content"], tool_calls=[call("read", json.loads(ARGUMENTS))]),
    "another call id": assistant(ANSWER["content"], tool_calls=[{**call("read", AGAIN), "id": "toolu_7"}]),
    "fields added": assistant(ANSWER["content"], tool_calls=CALLS, refusal=None, audio=None, name="agent"),
    "no text beside calls": assistant(None, tool_calls=CALLS),
}  # fmt: skip
EDITS = {
    "text": assistant("First, look at this.", tool_calls=CALLS),
    "argument": assistant(ANSWER["content"], tool_calls=[call("read", AGAIN.replace("a/b", "a/c"))]),
    "number": assistant(ANSWER["content"], tool_calls=[call("read", AGAIN.replace("1.0", '"1"'))]),
    "name": assistant(ANSWER["content"], tool_calls=[call("write", ARGUMENTS)]),
    "call added": assistant(ANSWER["content"], tool_calls=[*CALLS, call("read", "{}")]),
    "call dropped": assistant(ANSWER["content"]),
    "not JSON": assistant(ANSWER["content"], tool_calls=[call("read", ARGUMENTS[:-1])]),
    "role": {**ANSWER, "role": "user", "reasoning_content": None},
}


def recorded(mode: Mode = Mode.OPEN, echo: Echo = Echo.RECOGNISED) -> Conversation:
    return record(conversation(mode, echo=echo), ([user("1")], ANSWER))


RESULT = {"role": "tool", "tool_call_id": "call_0", "content": "2"}


@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES)
@pytest.mark.parametrize("mode", Mode)
def test_an_echo_is_the_recorded_answer(mode: Mode, echo: dict[str, Any]) -> None:
    request = recorded(mode).prepare([user("1"), echo, RESULT])
    assert (request.parent.turn, request.appended) == (0, [RESULT])
    assert list(request.repairs) == [(1, 0)]


def test_an_echo_without_text_is_the_answer_that_had_none() -> None:
    silent = assistant(None, tool_calls=CALLS)
    twice = record(recorded(), ([user("1")], silent), ([user("1")], ANSWER))
    assert [twice.prepare([user("1"), echo, RESULT]).parent.turn for echo in (silent, ANSWER)] == [1, 2]


@pytest.mark.parametrize("edited", EDITS.values(), ids=EDITS)
def test_an_edited_answer_is_a_new_message(edited: dict[str, Any]) -> None:
    request = recorded().prepare([user("1"), edited, RESULT])
    assert (request.parent.turn, list(request.repairs)) == (-1, [])
    twice = record(recorded(Mode.LINEAR), ([user("1"), ANSWER, RESULT], assistant("two")))
    with pytest.raises(BadRequest, match="diverge"):
        twice.prepare([user("1"), edited, RESULT, assistant("two"), user("3")])


def test_an_unchanged_echo_needs_no_repair() -> None:
    indexed = {**ANSWER, "tool_calls": [{"index": 0, **CALLS[0]}]}
    for echo in (Echo.RECOGNISED, Echo.EXACT):
        for unchanged in (ANSWER, {**ANSWER, "refusal": None}, indexed):
            request = recorded(echo=echo).prepare([user("1"), unchanged, RESULT])
            assert (request.parent.turn, list(request.repairs)) == (0, [])


@pytest.mark.parametrize("name", [name for name in ECHOES if name != "fields added"])
def test_with_exact_echoes_each_of_them_is_a_new_message(name: str) -> None:
    assert recorded(echo=Echo.EXACT).prepare([user("1"), ECHOES[name], RESULT]).parent.turn == -1


def test_an_answer_is_recognised_behind_its_own_parent_only() -> None:
    both = record(recorded(), ([user("another task")], ANSWER))
    dropped = ECHOES["thoughts dropped"]
    assert both.prepare([user("another task"), dropped, RESULT]).parent.turn == 1
    assert both.prepare([user("a third task"), dropped, RESULT]).parent.turn == -1
    assert both.prepare([user("1"), dropped, dropped, RESULT]).parent.turn == 0


def test_messages_that_were_never_recorded_are_compared_exactly() -> None:
    shots = [user("1"), assistant("for  example"), user("2")]
    linear = record(conversation(Mode.OPEN), (shots, assistant("two")))
    assert linear.prepare([*shots, assistant("two "), user("3")]).parent.turn == 0
    changed = [shots[0], assistant("for example"), shots[2]]
    assert linear.prepare([*changed, assistant("two"), user("3")]).parent.turn == -1


def test_of_answers_with_one_meaning_an_unchanged_echo_selects_its_own() -> None:
    first, second = assistant("yes", reasoning_content="one"), assistant("yes", reasoning_content="two")
    twice = record(conversation(Mode.OPEN), ([user("?")], first), ([user("?")], second))
    assert twice.prepare([user("?"), first, user("!")]).parent.turn == 0
    assert twice.prepare([user("?"), second, user("!")]).parent.turn == 1
    without = twice.prepare([user("?"), assistant("yes"), user("!")])
    assert (without.parent.turn, list(without.repairs)) == (1, [(1, 1)])
    twice.commit(twice.checkpoint_after(without, assistant("go on")))
    twice.commit(twice.checkpoint_after(twice.prepare([user("?")]), assistant("yes", reasoning_content="three")))
    later = twice.prepare([user("?"), assistant("yes"), user("!"), assistant("go on"), user("!!")])
    assert (later.parent.turn, list(later.repairs)) == (2, [(1, 1)])


def test_restored_messages_have_the_recorded_answer_and_its_call_ids() -> None:
    echo = {"role": "assistant", "content": "", "tool_calls": [{**CALLS[0], "id": "x1"}, {**CALLS[0], "id": "x2"}]}
    answer = {**ANSWER, "tool_calls": [{**CALLS[0], "id": "call_3_0"}, {**CALLS[0], "id": "call_3_1"}], "refusal": None}
    results = [{"role": "tool", "tool_call_id": id, "content": id} for id in ("x2", "x1", "y")]
    messages = restored([user("1"), echo, *results], {1: answer})
    assert messages[0] == user("1")
    assert messages[1] == {name: value for name, value in answer.items() if value}
    assert [message["tool_call_id"] for message in messages[2:]] == ["call_3_1", "call_3_0", "y"]
    assert restored([assistant(None)], {0: {"role": "assistant", "content": None}}) == [assistant("")]


def test_deeply_nested_arguments_are_compared_as_text() -> None:
    deep = "[" * 400 + "]" * 400
    nested = assistant("x", tool_calls=[call("f", deep)])
    kept = record(conversation(Mode.OPEN), ([user("1")], nested))
    assert kept.prepare([user("1"), {**nested, "content": "x "}, user("2")]).parent.turn == 0
    for odd in ([1], [[]], [{"a": 1}], ["text"]):
        assert kept.prepare([user("1"), assistant("x", tool_calls=odd), user("2")]).parent.turn == -1

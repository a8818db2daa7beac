from typing import Any

import pytest

from headpond.errors import BadRequest
from headpond.recording.conversation import Conversation, Mode
from headpond.recording.echoes import Echo


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


SYSTEM = {"role": "system", "content": "Be brief."}


def conversation(mode: Mode = Mode.LINEAR, roles: str = "user tool", echo: Echo = Echo.RECOGNISED) -> Conversation:
    return Conversation(mode=mode, append_roles=frozenset(roles.split()), echo=echo)


def record(recorded: Conversation, *turns: tuple[list[dict[str, Any]], dict[str, Any]]) -> Conversation:
    for messages, answer in turns:
        recorded.commit(recorded.checkpoint_after(recorded.prepare(messages), answer))
    return recorded


FIRST = ([SYSTEM, user("1")], assistant("one"))
SECOND = ([*FIRST[0], FIRST[1], user("2")], assistant("two"))
THIRD = ([*SECOND[0], SECOND[1], user("3")], assistant("three"))


def test_a_request_continues_from_the_last_answer() -> None:
    recorded = record(conversation(), FIRST)
    request = recorded.prepare(SECOND[0])
    assert request.parent.turn == 0
    assert request.appended == [user("2")]
    assert record(recorded, SECOND, THIRD).current() == [0, 1, 2]


def test_none_empty_text_and_empty_list_are_equal() -> None:
    answers = [assistant(None), assistant(""), assistant([]), {"role": "assistant"}]
    extras = [{}, {"tool_calls": None}, {"tool_calls": []}, {"reasoning_content": ""}, {"name": "ignored", "id": 7}]
    recorded = record(conversation(), ([user("1")], assistant(None, tool_calls=[])))
    for answer in answers:
        for extra in extras:
            assert recorded.prepare([user("1"), {**answer, **extra}, user("2")]).parent.turn == 0


@pytest.mark.parametrize(
    "changed",
    [
        assistant("One"),
        assistant("one", reasoning_content="hm"),
        assistant("one", tool_calls=[{"id": "1"}]),
        {"role": "user", "content": "one"},
        assistant([{"type": "text", "text": "one"}]),
    ],
)
def test_with_exact_echoes_a_changed_message_diverges(changed: dict[str, Any]) -> None:
    recorded = record(conversation(echo=Echo.EXACT), FIRST, SECOND)
    with pytest.raises(BadRequest, match="diverge"):
        recorded.prepare([*FIRST[0], changed, user("2"), SECOND[1], user("3")])


def test_the_order_of_keys_in_tool_calls_does_not_matter() -> None:
    recorded = record(
        conversation(), ([user("1")], assistant(None, tool_calls=[{"id": "a", "function": {"name": "f"}}]))
    )
    echo = assistant(None, tool_calls=[{"function": {"name": "f"}, "id": "a"}])
    assert recorded.prepare([user("1"), echo, {"role": "tool", "content": "4"}]).parent.turn == 0


def test_going_back_discards_one_answer() -> None:
    recorded = record(conversation(), FIRST, SECOND)
    again = recorded.prepare([*FIRST[0], FIRST[1], user("another 2")])
    assert again.parent.turn == 0
    assert again.appended == [user("another 2")]
    recorded.commit(recorded.checkpoint_after(again, assistant("two'")))
    assert recorded.current() == [0, 2]
    assert recorded.path_to(1) == [0, 1]


def test_going_back_over_two_answers_is_refused_and_changes_nothing() -> None:
    recorded = record(conversation(), FIRST, SECOND, THIRD)
    with pytest.raises(BadRequest, match="at most one generated message"):
        recorded.prepare([*FIRST[0], FIRST[1], user("another 2")])
    assert recorded.current() == [0, 1, 2]
    assert recorded.prepare([*THIRD[0], THIRD[1], user("4")]).parent.turn == 2


def test_after_going_back_the_limit_counts_along_the_new_path() -> None:
    recorded = record(conversation(), FIRST, SECOND, ([*FIRST[0], FIRST[1], user("2'")], assistant("two'")))
    assert recorded.prepare([*FIRST[0], FIRST[1], user("2''")]).parent.turn == 0
    with pytest.raises(BadRequest, match="only tool, user may be appended"):
        recorded.prepare(
            [*SECOND[0], SECOND[1], user("3")]
        )  # the discarded answer is not part of the conversation any more


def test_the_first_request_may_be_repeated() -> None:
    recorded = record(conversation(), FIRST)
    again = recorded.prepare(FIRST[0])
    assert again.parent.turn == -1
    assert again.appended == FIRST[0]
    recorded.commit(recorded.checkpoint_after(again, assistant("uno")))
    assert recorded.current() == [1]
    assert recorded.prepare([*FIRST[0], assistant("uno"), user("2")]).parent.turn == 1


def test_another_first_request_is_refused() -> None:
    recorded = record(conversation(), FIRST)
    with pytest.raises(BadRequest, match="diverge"):
        recorded.prepare([SYSTEM, user("something else")])
    with pytest.raises(BadRequest, match="diverge"):
        recorded.prepare([SYSTEM])


@pytest.mark.parametrize("role", ["system", "assistant", "developer"])
def test_only_allowed_roles_may_be_appended(role: str) -> None:
    recorded = record(conversation(), FIRST)
    with pytest.raises(BadRequest, match=rf"messages\[4\] .*'{role}': only tool, user"):
        recorded.prepare([*SECOND[0], {"role": role, "content": "x"}])
    assert record(conversation(roles=role), FIRST).prepare([*FIRST[0], FIRST[1], {"role": role}]).parent.turn == 0


def test_a_request_that_appends_nothing_is_refused() -> None:
    recorded = record(conversation(), FIRST, SECOND)
    for messages in ([*SECOND[0], SECOND[1]], [*FIRST[0], FIRST[1]]):
        with pytest.raises(BadRequest, match="nothing to complete"):
            recorded.prepare(messages)


def test_open_mode_accepts_any_conversation() -> None:
    recorded = record(conversation(Mode.OPEN), FIRST, SECOND, THIRD)
    assert recorded.prepare([user("a sub-agent")]).parent.turn == -1
    back = recorded.prepare([*FIRST[0], FIRST[1], assistant("an answer of the caller"), user("?")])
    assert back.parent.turn == 0
    assert len(back.appended) == 2
    assert recorded.prepare([*THIRD[0], THIRD[1], user("4")]).parent.turn == 2


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "at least one"),
        ({}, "at least one"),
        ("hello", "at least one"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"content": "no role"}], r"messages\[0\] must be an object with a role"),
        ([user("1"), {"role": 7}], r"messages\[1\]"),
        ([user([{"type": "image_url", "image_url": {}}])], "only text parts are supported"),
        ([user(["bare text"])], "not text"),
        ([user({1, 2})], r"messages\[0\].content must be text"),
        ([user(5)], r"messages\[0\].content must be text"),
        ([{"role": "assistant", "tool_calls": 5}], r"messages\[0\].tool_calls must be a list"),
        ([user("1") | {"reasoning_content": {1, 2}}], "not JSON-serializable"),
    ],
)
@pytest.mark.parametrize("mode", Mode)
def test_malformed_messages_are_refused(messages: Any, complaint: str, mode: Mode) -> None:
    with pytest.raises(BadRequest, match=complaint):
        conversation(mode).prepare(messages)

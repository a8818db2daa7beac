"""Whatever a client sends through an API: it becomes a chat, or is refused with a reason."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy
from support.api_clients import CLIENTS, ApiClient
from support.upstream import calling, tool_call, user

from headpond.config.sessions import LeaveOut
from headpond.errors import BadRequest
from headpond.recording import digest_messages
from headpond.servers.sessions.apis import APIS, api_of
from headpond.servers.sessions.requests import ChatRules, read_chat

NAMES = [
    "messages",
    "input",
    "system",
    "instructions",
    "role",
    "content",
    "type",
    "text",
    "tools",
    "tool_choice",
    "name",
]
NAMES += ["namespace", "description", "format", "definition", "call_id", "output", "arguments", "thinking", "summary"]
NAMES += ["tool_use_id", "id", "include", "output_config", "prompt", "logprobs", "stop_sequences", "max_tokens"]
KINDS = ["text", "input_text", "output_text", "tool_use", "tool_result", "thinking", "reasoning", "function_call"]
KINDS += ["function_call_output", "custom", "namespace", "function", "custom_tool_call", "image", "json_schema", "tool"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 3) | st.sampled_from(["", "x", "user", "assistant", *KINDS]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=8,
)
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "1"}
CONVERSATION = [
    user("go"),
    {**calling(tool_call("f", "{}")), "reasoning_content": "hm"},
    {"role": "tool", "tool_call_id": "c1", "content": "1"},
]


def paths(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in a request, and of fields that its objects could have."""
    yield before
    if isinstance(value, dict):
        for name in {*value, *NAMES}:
            yield from paths(value.get(name), (*before, name))
    elif isinstance(value, list):
        for at, each in enumerate(value):
            yield from paths(each, (*before, at))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    first, *rest = path
    if isinstance(value, dict):
        return {**value, first: replaced(value.get(first), tuple(rest), new)}
    return [*value[:first], replaced(value[first], tuple(rest), new), *value[first + 1 :]]


@pytest.mark.parametrize("client", CLIENTS[1:], ids=lambda client: client.name)
@settings(max_examples=400)
@given(data=st.data())
def test_an_altered_request_is_a_chat_or_refused(client: ApiClient, data: st.DataObject) -> None:
    request = client.request(client.items(CONVERSATION), system="s", tools=TOOLS)
    for _ in range(data.draw(st.integers(1, 2))):
        places = sorted(filter(None, paths(request)), key=repr)
        request = replaced(request, data.draw(st.sampled_from(places)), data.draw(VALUES))
    try_to_translate(api_of(f"/sessions/x{client.path}").chat, request)


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
@settings(max_examples=100)
@given(request=st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_any_request_is_a_chat_or_refused(api: Any, request: dict[str, Any]) -> None:
    try_to_translate(api.chat, request)


def try_to_translate(chat: Callable[[dict[str, Any], None], Any], request: dict[str, Any]) -> None:
    """Any error but BadRequest would be answered with 500."""
    with contextlib.suppress(BadRequest):
        translated = chat(request, None)
        if translated.prompt_ids is None:
            digest_messages(translated.fields.get("messages"))


@pytest.mark.parametrize(
    ("path", "request_body", "where"),
    [
        ("/v1/messages", {"system": [{"type": "text", "text": 5}]}, "system[0] of type 'text'"),
        ("/v1/messages", {"system": 5}, "system must be a list"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [RESULT, {"type": "text"}]}]},
            "messages[0].content[1] of type 'text'",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "assistant", "content": [{"type": "output_text", "text": "a"}, {"type": "image"}]}]},
            "input[0].content[1] of type 'image'",
        ),
    ],
)
def test_the_reason_names_the_place(path: str, request_body: dict[str, Any], where: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(where)):
        api_of(f"/sessions/x{path}").chat(request_body, None)


@pytest.mark.parametrize(
    ("path", "request_body"),
    [
        ("/v1/completions", {"prompt": [1, 2], "messages": [5]}),
        ("/v1/completions", {"prompt": [1, 2], "messages": 5}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
    ],
)
def test_rules_read_any_request(path: str, request_body: dict[str, Any]) -> None:
    rules = ChatRules(defaults={}, forced={}, leave_out={"titles": LeaveOut(system="title", user="title")})
    headers = CIMultiDictProxy(CIMultiDict[str]())
    chat = read_chat(api_of(f"/sessions/x{path}"), request_body, headers=headers, rules=rules)
    assert not chat.left_out_by

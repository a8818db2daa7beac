"""Whatever a client sends through an API: it becomes a chat, or is refused with a reason."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.api_clients import CLIENTS, ApiClient
from support.upstream import calling, tool_call, user

from penstock.errors import BadRequest
from penstock.recording import digest_messages
from services.sessions.apis import APIS, api_of

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

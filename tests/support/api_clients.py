"""Agents that speak one API each: how they send a conversation, and how they return the answers that they get.

Each keeps a conversation in its API's own form. Chat messages go in, for the beginning of a conversation and for what
an agent appends.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

Message = dict[str, Any]
Items = list[dict[str, Any]]


class ApiClient(ABC):
    name: ClassVar[str]
    path: ClassVar[str]

    @abstractmethod
    def items(self, messages: Sequence[Message]) -> Items:
        """Chat messages in this API's form."""

    @abstractmethod
    def request(self, items: Items, *, system: str = "", tools: Items | None = None) -> dict[str, Any]:
        """`tools` are those of Chat Completions."""

    @abstractmethod
    def answer(self, response: dict[str, Any]) -> Items:
        """What an agent keeps of a response: it returns it with its next request."""

    @abstractmethod
    def streamed(self, body: bytes) -> dict[str, Any]:
        """The response that the events of a stream add up to."""

    @abstractmethod
    def calls(self, answer: Items) -> list[str]:
        """The ids of the calls in an answer."""


class ChatClient(ApiClient):
    name, path = "chat", "/v1/chat/completions"

    def items(self, messages: Sequence[Message]) -> Items:
        return list(messages)

    def request(self, items: Items, *, system: str = "", tools: Items | None = None) -> dict[str, Any]:
        before = [{"role": "system", "content": system}] if system else []
        return {"messages": [*before, *items], **({"tools": tools} if tools else {})}

    def answer(self, response: dict[str, Any]) -> Items:
        return [response["choices"][0]["message"]]

    def streamed(self, body: bytes) -> dict[str, Any]:
        message: Message = {}
        for chunk in _events(body):
            for name, value in chunk["choices"][0]["delta"].items() if chunk["choices"] else ():
                message[name] = message[name] + value if message.get(name) and name != "role" else value
        for call in message.get("tool_calls") or []:
            del call["index"]
        return {"choices": [{"message": message}]}

    def calls(self, answer: Items) -> list[str]:
        return [call["id"] for call in answer[0].get("tool_calls") or []]


class MessagesClient(ApiClient):
    name, path = "messages", "/v1/messages"

    def items(self, messages: Sequence[Message]) -> Items:
        items: Items = []
        for message in messages:
            match message["role"]:
                case "tool":
                    block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": _text(message)}
                    if items and items[-1]["role"] == "user" and items[-1]["content"][0]["type"] == "tool_result":
                        items[-1]["content"].append(block)
                    else:
                        items.append({"role": "user", "content": [block]})
                case "assistant":
                    items.append({"role": "assistant", "content": self._blocks(message)})
                case role:
                    items.append({"role": role, "content": [{"type": "text", "text": _text(message)}]})
        return items

    def request(self, items: Items, *, system: str = "", tools: Items | None = None) -> dict[str, Any]:
        given = [
            {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in tools or []
        ]
        more = ({"system": [{"type": "text", "text": system}]} if system else {}) | ({"tools": given} if given else {})
        return {"max_tokens": 1000, "messages": items, **more}

    def answer(self, response: dict[str, Any]) -> Items:
        return [{"role": "assistant", "content": response["content"]}]

    def streamed(self, body: bytes) -> dict[str, Any]:
        message: dict[str, Any] = {}
        for event in _events(body):
            match event["type"]:
                case "message_start":
                    message = event["message"]
                case "content_block_start":
                    message["content"].append(dict(event["content_block"]))
                case "content_block_delta":
                    _add_delta(message["content"][event["index"]], event["delta"])
                case "content_block_stop":
                    block = message["content"][event["index"]]
                    if "json" in block:
                        block["input"] = json.loads(block.pop("json"))
                case "message_delta":
                    message |= event["delta"] | {"usage": event["usage"]}
                case _:
                    pass
        return message

    def calls(self, answer: Items) -> list[str]:
        return [block["id"] for block in answer[0]["content"] if block["type"] == "tool_use"]

    def _blocks(self, message: Message) -> Items:
        blocks: Items = []
        if thoughts := _thoughts(message):
            blocks.append({"type": "thinking", "thinking": thoughts, "signature": "signed"})
        if text := _text(message):
            blocks.append({"type": "text", "text": text})
        for id, name, arguments in _called(message):
            blocks.append({"type": "tool_use", "id": id, "name": name, "input": json.loads(arguments)})
        return blocks


class ResponsesClient(ApiClient):
    name, path = "responses", "/v1/responses"

    def items(self, messages: Sequence[Message]) -> Items:
        items: Items = []
        for message in messages:
            match message["role"]:
                case "tool":
                    id = message["tool_call_id"]
                    items.append({"type": "function_call_output", "call_id": id, "output": _text(message)})
                case "assistant":
                    items += self._answer_items(message)
                case role:
                    content = [{"type": "input_text", "text": _text(message)}]
                    items.append({"type": "message", "role": role, "content": content})
        return items

    def request(self, items: Items, *, system: str = "", tools: Items | None = None) -> dict[str, Any]:
        given = [{"type": "function", "strict": False, **tool["function"]} for tool in tools or []]
        more = ({"instructions": system} if system else {}) | ({"tools": given} if given else {})
        return {"input": items, "store": False, **more}

    def answer(self, response: dict[str, Any]) -> Items:
        return response["output"]

    def streamed(self, body: bytes) -> dict[str, Any]:
        *_, last = _events(body)
        assert last["type"] in ("response.completed", "response.incomplete")
        return last["response"]

    def calls(self, answer: Items) -> list[str]:
        return [item["call_id"] for item in answer if item["type"] == "function_call"]

    def _answer_items(self, message: Message) -> Items:
        items: Items = []
        if thoughts := _thoughts(message):
            items.append(
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thoughts}]}
            )
        if text := _text(message):
            items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]})
        for id, name, arguments in _called(message):
            items.append({"type": "function_call", "call_id": id, "name": name, "arguments": arguments})
        return items


CLIENTS: tuple[ApiClient, ...] = (ChatClient(), MessagesClient(), ResponsesClient())


def _events(body: bytes) -> list[Any]:
    lines = (line.removeprefix("data: ") for line in body.decode().splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _add_delta(block: dict[str, Any], delta: dict[str, Any]) -> None:
    match delta:
        case {"type": "input_json_delta", "partial_json": text}:
            block["json"] = block.get("json", "") + text
        case {"type": kind, **values}:
            assert kind.endswith("_delta")
            for name, value in values.items():
                block[name] += value
        case _:
            raise AssertionError(delta)


def _text(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def _thoughts(message: Message) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    thought = [part["thinking"] for part in parts if part["type"] == "thinking"]
    return message.get("reasoning_content") or message.get("reasoning") or "".join(thought)


def _called(message: Message) -> list[tuple[str, str, str]]:
    calls: list[tuple[str, str, str]] = []
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append((call["id"], call["function"]["name"], text))
    return calls

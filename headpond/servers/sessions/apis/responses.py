"""OpenAI's Responses API.

Items of an assistant in a row, thoughts, text and calls, are one answer. Tools of namespaces become functions whose
names begin with the namespace, custom tools become functions with one argument; their calls are translated back.
"""

from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import orjson

from headpond.errors import BadRequest
from headpond.servers.sessions.apis.base import (
    JOINED_BY,
    Api,
    AssistantParts,
    ChatRequest,
    Completion,
    Fields,
    History,
    Recorded,
    arguments_object,
    as_chat,
    dumped,
    event,
    function_tool,
    json_format,
    listed,
    mapping,
    part_text,
    passed,
    refuse,
    text_of,
    tool_call,
    unsupported,
    with_system,
)
from headpond.turn import Message

TEXT = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
REFUSED = {
    "background": "send the request without it, and wait for the response",
    "conversation": "send the items, or previous_response_id",
    "prompt": "send instructions and input",
}
# Tools whose type begins with this are left out: the agent does not run them, and the policy cannot.
DROPPED = "web_search"
ROLES = {"user": "user", "system": "system", "developer": "system"}
ANSWER_ITEMS = ("reasoning", "function_call", "custom_tool_call")
ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
ECHOED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "store", "temperature", "top_p")
CUSTOM_INPUT = "input"
CUSTOM_PARAMETERS = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}


@dataclass(frozen=True, kw_only=True)
class ToolName:
    name: str
    namespace: str | None = None
    custom: bool = False

    @property
    def function(self) -> str:
        """Return the name that the policy uses."""
        if self.namespace is None:
            return self.name
        return self.namespace + ("" if self.namespace.endswith("__") else "__") + self.name


@dataclass(kw_only=True)
class Context:
    """Values of the request that its response needs."""

    echoed: dict[str, Any]
    tool_choice: Any
    parallel: bool
    include: frozenset[str]
    # name of a function -> a tool that is not a plain function
    tools: dict[str, ToolName] = field(default_factory=dict[str, ToolName])


class Responses(Api):
    path: ClassVar[str] = "/v1/responses"

    def continues(self, given: Fields) -> str | None:
        return given.get("previous_response_id")

    def chat(self, given: dict[str, Any], history: History | None) -> ChatRequest:
        refuse(given, REFUSED)
        context = _context(given)
        instructions = given.get("instructions") or ""
        if not isinstance(instructions, str):
            raise BadRequest("instructions must be a string")
        messages = with_system([instructions], [*_earlier(history), *_messages(given.get("input"))])
        fields = passed(given) | {"messages": messages}
        if (limit := given.get("max_output_tokens")) is not None:
            fields["max_tokens"] = limit
        if tools := list(_tools(given.get("tools"), context)):
            fields["tools"] = tools
            fields |= _tool_choice(given)
        if LOGPROBS in context.include:
            fields |= {"logprobs": True, "top_logprobs": given.get("top_logprobs") or 0}
        return ChatRequest(fields=fields | _format(given), context=context, instructions=len(instructions))

    def response(self, recorded: Recorded) -> bytes:
        completion = Completion.of(recorded.completion)
        items = list(_items(recorded.id, completion, recorded.context))
        return orjson.dumps(_ended(recorded, completion, items))

    def stream(self, recorded: Recorded) -> bytes:
        completion = Completion.of(recorded.completion)
        begun = _response(recorded, completion) | {"status": "in_progress"}
        events: list[tuple[str, dict[str, Any]]] = [
            ("response.created", {"response": begun}),
            ("response.in_progress", {"response": begun}),
        ]
        items = list(_items(recorded.id, completion, recorded.context))
        for index, item in enumerate(items):
            events += ((f"response.{name}", data | {"output_index": index}) for name, data in _item_events(item))
        ended = _ended(recorded, completion, items)
        events.append((f"response.{ended['status']}", {"response": ended}))
        return b"".join(
            event(name, {"type": name, "sequence_number": number, **data}) for number, (name, data) in enumerate(events)
        )

    def error_events(self, error: dict[str, Any]) -> bytes:
        """OpenAI's clients raise at the first event, others wait for the second."""
        details = error["error"]
        code, message = details.get("code"), details.get("message")
        first = {"type": "error", "sequence_number": 0, "code": code, "message": message, "param": None}
        failed: dict[str, Any] = {
            "id": "resp_failed",
            "object": "response",
            "created_at": 0,
            "status": "failed",
            "model": "",
            "output": [],
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "error": {"code": code, "message": message},
        }
        second = {"type": "response.failed", "sequence_number": 1, "response": failed}
        return event("error", first | {"error": details}) + event("response.failed", second)


def _context(given: Fields) -> Context:
    return Context(
        echoed={name: given.get(name) for name in ECHOED},
        tool_choice=given.get("tool_choice") or "auto",
        parallel=given.get("parallel_tool_calls") is not False,
        include=frozenset(each for each in listed(given.get("include"), "include") if isinstance(each, str)),
    )


def _earlier(history: History | None) -> list[Message]:
    """Instructions hold for one request; the items behind them go on."""
    if history is None:
        return []
    messages = list(history.messages)
    if history.instructions:
        rest = messages[0]["content"][history.instructions :].removeprefix(JOINED_BY)
        messages[:1] = [{"role": "system", "content": rest}] if rest else []
    return messages


def _messages(given: object) -> list[Message]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return as_chat(given, "input", _add_item, _other_messages)


def _add_item(assistant: AssistantParts, item: Fields, where: str) -> bool:
    kind = item.get("type")
    if kind not in ANSWER_ITEMS and not (kind in (None, "message") and item.get("role") == "assistant"):
        return False
    match item:
        case {"type": "reasoning"}:
            texts = item.get("content") or item.get("summary") or []
            assistant.thoughts.append(text_of(texts, f"{where}.content", TEXT))
        case {"type": "function_call", "name": str(name), "arguments": str(arguments)}:
            known = ToolName(name=name, namespace=_string(item, "namespace", where))
            assistant.calls.append(tool_call(_call_id(item, where), known.function, arguments))
        case {"type": "custom_tool_call", "name": str(name), "input": str(text)}:
            known = ToolName(name=name, namespace=_string(item, "namespace", where))
            assistant.calls.append(tool_call(_call_id(item, where), known.function, dumped({CUSTOM_INPUT: text})))
        case {"role": "assistant", "content": str(text)}:
            assistant.texts.append(text)
        case {"role": "assistant", "content": list(parts)}:
            for part_at, part in enumerate(cast("list[object]", parts)):
                assistant.texts.append(part_text(part, f"{where}.content[{part_at}]", TEXT))
        case _:
            raise unsupported(item, where)
    return True


def _other_messages(item: Fields, where: str) -> Iterator[Message]:
    match item:
        case {"type": "function_call_output" | "custom_tool_call_output", "output": output}:
            text = text_of(output, f"{where}.output", TEXT)
            yield {"role": "tool", "tool_call_id": _call_id(item, where), "content": text}
        case {"role": str(role)} if item.get("type") in (None, "message") and role in ROLES:
            yield {"role": ROLES[role], "content": text_of(item.get("content"), f"{where}.content", TEXT)}
        case {"type": "item_reference"}:
            raise BadRequest(f"{where} refers to an item: send the item, or previous_response_id")
        case _:
            raise unsupported(item, where)


def _string(item: Fields, name: str, where: str) -> str | None:
    value = item.get(name)
    if not isinstance(value, str | None):
        raise BadRequest(f"{where}.{name} must be a string")
    return value


def _call_id(item: Fields, where: str) -> str:
    if (id := _string(item, "call_id", where)) is None:
        raise BadRequest(f"{where}.call_id must be a string")
    return id


def _tools(given: object, context: Context, namespace: str | None = None) -> Iterator[dict[str, Any]]:
    for at, each in enumerate(listed(given, "tools")):
        where = f"tools[{at}]"
        tool = mapping(each, where)
        match tool:
            case {"type": "function" | "custom" as kind, "name": str(name)}:
                known = ToolName(name=name, namespace=namespace, custom=kind == "custom")
                if namespace is not None or known.custom:
                    context.tools[known.function] = known
                parameters = CUSTOM_PARAMETERS if known.custom else tool.get("parameters")
                yield function_tool(known.function, _description(tool), parameters)
            case {"type": "namespace", "name": str(name)} if namespace is None:
                yield from _tools(tool.get("tools"), context, name)
            case {"type": str(kind)} if kind.startswith(DROPPED):
                pass
            case _:
                kind = tool.get("type")
                raise BadRequest(f"{where}.type {kind!r} cannot be recorded: declare a function that the agent runs")


def _description(tool: Fields) -> object:
    """Add the grammar of a custom tool, which is not enforced."""
    match tool.get("format"):
        case {"definition": str(definition)}:
            return "\n\n".join(text for text in (tool.get("description"), definition) if text and isinstance(text, str))
        case _:
            return tool.get("description")


def _tool_choice(given: Fields) -> dict[str, Any]:
    parallel = {"parallel_tool_calls": False} if given.get("parallel_tool_calls") is False else {}
    match given.get("tool_choice"):
        case None:
            return parallel
        case "auto" | "none" | "required" as choice:
            return {"tool_choice": choice} | parallel
        case {"type": "function" | "custom", "name": str(name), **rest}:
            known = ToolName(name=name, namespace=_string(cast("Fields", rest), "namespace", "tool_choice"))
            return {"tool_choice": {"type": "function", "function": {"name": known.function}}} | parallel
        case choice:
            raise BadRequest(f"tool_choice {choice!r} cannot be recorded: use auto, none, required or a function")


def _format(given: Fields) -> dict[str, Any]:
    match given.get("text"):
        case {"format": {"type": "json_schema", "schema": schema, **rest}}:
            named = cast("Fields", rest)
            return {"response_format": json_format(named.get("name"), schema, named.get("strict"))}
        case {"format": {"type": "json_object"}}:
            return {"response_format": {"type": "json_object"}}
        case {"format": {"type": str(kind)}} if kind != "text":
            raise BadRequest(f"text.format of type {kind!r} cannot be recorded: use text, json_object or json_schema")
        case _:
            return {}


def _response(recorded: Recorded, completion: Completion) -> dict[str, Any]:
    context: Context = recorded.context
    return {
        "id": f"resp_{recorded.id}",
        "object": "response",
        "created_at": completion.created,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": completion.model,
        "output": [],
        "parallel_tool_calls": context.parallel,
        "tool_choice": context.tool_choice,
        "tools": [],
        "truncation": "disabled",
        "usage": None,
        **context.echoed,
    }


def _ended(recorded: Recorded, completion: Completion, items: list[dict[str, Any]]) -> dict[str, Any]:
    response = _response(recorded, completion) | {"output": items, "usage": _usage(completion)}
    if completion.finish_reason in ("length", "content_filter"):
        reason = "max_output_tokens" if completion.finish_reason == "length" else "content_filter"
        response |= {"status": "incomplete", "incomplete_details": {"reason": reason}}
    return response


def _usage(completion: Completion) -> dict[str, Any]:
    return {
        "input_tokens": completion.prompt_tokens,
        "input_tokens_details": {"cached_tokens": completion.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": completion.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": completion.reasoning_tokens},
        "total_tokens": completion.prompt_tokens + completion.completion_tokens,
    }


def _items(id: str, completion: Completion, context: Context) -> Iterator[dict[str, Any]]:
    calls = list(completion.calls)
    if thoughts := completion.thoughts:
        item = {"id": f"rs_{id}", "type": "reasoning", "summary": [], "status": "completed"}
        if ENCRYPTED in context.include:
            item["encrypted_content"] = b64encode(thoughts.encode("utf-8", "replace")).decode()
        yield item | {"content": [{"type": "reasoning_text", "text": thoughts}]}
    if completion.text or not calls:
        part = {"type": "output_text", "text": completion.text, "annotations": [], "logprobs": completion.logprobs}
        yield {"id": f"msg_{id}", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    for number, (call_id, name, arguments) in enumerate(calls):
        known = context.tools.get(name, ToolName(name=name))
        item = {"id": f"fc_{id}{number}", "call_id": call_id, "name": known.name, "status": "completed"}
        if known.namespace is not None:
            item["namespace"] = known.namespace
        if known.custom:
            text = arguments_object(arguments).get(CUSTOM_INPUT)
            yield item | {"type": "custom_tool_call", "input": text if isinstance(text, str) else arguments}
        else:
            yield item | {"type": "function_call", "arguments": arguments}


def _item_events(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    named = {"item_id": item["id"]}
    match item["type"]:
        case "function_call":
            yield "output_item.added", {"item": item | {"arguments": "", "status": "in_progress"}}
            yield "function_call_arguments.delta", named | {"delta": item["arguments"]}
            yield "function_call_arguments.done", named | {"arguments": item["arguments"], "name": item["name"]}
        case "custom_tool_call":
            yield "output_item.added", {"item": item | {"input": "", "status": "in_progress"}}
            yield "custom_tool_call_input.delta", named | {"delta": item["input"]}
            yield "custom_tool_call_input.done", named | {"input": item["input"]}
        case _:
            yield "output_item.added", {"item": item | {"content": [], "status": "in_progress"}}
            (part,) = item["content"]
            placed, text = named | {"content_index": 0}, part["text"]
            logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            empty = {name: [] for name in logprobs}
            kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            yield "content_part.added", placed | {"part": part | {"text": ""} | empty}
            yield f"{kind}.delta", placed | {"delta": text} | logprobs
            yield f"{kind}.done", placed | {"text": text} | logprobs
            yield "content_part.done", placed | {"part": part}
    yield "output_item.done", {"item": item}

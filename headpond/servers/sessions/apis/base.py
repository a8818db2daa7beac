"""What an API of the session server is: a translation of its requests to the one chat that is recorded, and of the
recorded completion to its responses, streams and errors. Here is also what several APIs share."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import orjson

from headpond.errors import BadRequest
from headpond.servers.sessions.client_response import Asked
from headpond.turn import Ids, Message, is_nested_too_deeply

Fields = Mapping[str, Any]

# Fields that mean the same in every API, or that engines read and no API has.
ENGINE_FIELDS = frozenset(
    {"model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty"}
    | {"frequency_penalty", "chat_template_kwargs", "logit_bias", "min_tokens", "ignore_eos", "skip_special_tokens"}
)
# Fields of vLLM and SGLang that reach beyond one's own completion -> why an agent's request is refused.
OF_OPERATORS = dict.fromkeys(
    {"kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "session_params", "lora_path"}
    | {"custom_logit_processor", "logits_processors"},
    "it makes the engine connect, load or run something; set it in forced when the session is created",
)
# Key of a call's arguments that are not a JSON object, in APIs that have room only for one.
UNPARSED = "_arguments"
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error"}
# Stands between the text parts of one message.
JOINED_BY = "\n\n"


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A request as a chat."""

    fields: dict[str, Any]  # fields of Chat Completions
    context: Any = None  # values of the request that the API's response needs
    instructions: int = 0  # characters of the first message that hold for this request only
    prompt_ids: Ids | None = None  # the prompt itself, in place of messages


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A recorded completion for its client."""

    completion: bytes  # OpenAI's chat completion, with the fields that the client asked for
    id: str  # unique among the answers of all sessions
    asked: Asked
    context: Any = None


@dataclass(frozen=True, kw_only=True)
class History:
    """The conversation up to a recorded answer, for a request that names that answer."""

    messages: Sequence[Message]
    instructions: int


class Api(ABC):
    path: ClassVar[str]
    # sent in a stream while there is nothing else
    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"

    @abstractmethod
    def chat(self, given: dict[str, Any], history: History | None) -> ChatRequest:
        """A client's request as a chat. BadRequest if a recording cannot honour it: the text names the field."""

    @abstractmethod
    def response(self, recorded: Recorded) -> bytes:
        """A completion in this API's form."""

    @abstractmethod
    def stream(self, recorded: Recorded) -> bytes:
        """The events of a completion."""

    def error(self, status: int, text: str, code: str) -> dict[str, Any]:
        """An error's JSON object, by default OpenAI's. `code` names the cause; it may be empty."""
        kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        return {"error": {"message": text, "type": kind, "code": code or kind}}

    def error_events(self, error: dict[str, Any]) -> bytes:
        """End a stream that had begun; by default as OpenAI's older APIs do."""
        return b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps(error)

    def continues(self, given: Fields) -> str | None:
        """The id of the answer that a request names instead of repeating the conversation."""
        return None


@dataclass(kw_only=True)
class AssistantParts:
    """The parts of an assistant's message, in whatever order they come."""

    thoughts: list[str] = field(default_factory=list[str])
    texts: list[str] = field(default_factory=list[str])
    calls: list[Message] = field(default_factory=list[Message])
    begun: bool = False

    def message(self) -> Message:
        """Return the message in the form of OpenAI's chat API."""
        message: Message = {"role": "assistant", "content": "".join(self.texts) or (None if self.calls else "")}
        if thoughts := "".join(self.thoughts):
            message["reasoning_content"] = thoughts
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def as_chat(
    given: object,
    name: str,
    add: Callable[[AssistantParts, Fields, str], bool],
    others: Callable[[Fields, str], Iterable[Message]],
) -> list[Message]:
    """The items of the field `name` as messages. `add` adds an item to the assistant's message, or returns False if it
    is no part of one; `others` has the messages of such an item."""
    messages, assistant = list[Message](), AssistantParts()
    for at, each in enumerate(listed(given, name)):
        where = f"{name}[{at}]"
        item = mapping(each, where)
        if add(assistant, item, where):
            assistant.begun = True
            continue
        if assistant.begun:
            messages.append(assistant.message())
            assistant = AssistantParts()
        messages += others(item, where)
    return [*messages, *([assistant.message()] if assistant.begun else [])]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A chat completion, decoded."""

    model: str
    created: int
    message: Message
    finish_reason: str | None
    stop: str | None  # the stop string that ended it
    logprobs: list[Any]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int

    @classmethod
    def of(cls, body: bytes) -> "Completion":
        response = orjson.loads(body)
        (choice,) = response["choices"]
        usage = _object(response.get("usage"))
        stops = [choice.get(name) for name in ("stop_reason", "matched_stop")]
        return cls(
            model=str(response.get("model") or ""),
            created=_count(response.get("created")),
            message=choice["message"],
            finish_reason=choice.get("finish_reason"),
            stop=next((stop for stop in stops if isinstance(stop, str)), None),
            logprobs=_object(choice.get("logprobs")).get("content") or [],
            prompt_tokens=_count(usage.get("prompt_tokens")),
            cached_tokens=_count(_object(usage.get("prompt_tokens_details")).get("cached_tokens")),
            completion_tokens=_count(usage.get("completion_tokens")),
            reasoning_tokens=_count(_object(usage.get("completion_tokens_details")).get("reasoning_tokens")),
        )

    @property
    def thoughts(self) -> str:
        given = (self.message.get(name) for name in ("reasoning_content", "reasoning"))
        return next((text for text in given if isinstance(text, str) and text), "")

    @property
    def text(self) -> str:
        return self.message.get("content") or ""

    @property
    def calls(self) -> Iterator[tuple[str, str, str]]:
        """Id, name and arguments of each call."""
        for number, call in enumerate(self.message.get("tool_calls") or []):
            function = _object(call.get("function"))
            arguments = function.get("arguments")
            text = arguments if isinstance(arguments, str) else dumped({} if arguments is None else arguments)
            yield call.get("id") or f"call_{number}", str(function.get("name") or ""), text


def event(name: str, data: Fields) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))


def passed(given: Fields) -> dict[str, Any]:
    """The fields that need no translation."""
    return {name: value for name, value in given.items() if name in ENGINE_FIELDS}


def refuse(given: Fields, names: Mapping[str, str]) -> None:
    """Raise BadRequest for a field of `names` that is set. The value is the advice."""
    for name, instead in names.items():
        if given.get(name):
            raise BadRequest(f"{name} is not supported by a recording: {instead}")


def text_of(content: object, where: str, kinds: frozenset[str]) -> str:
    """The text of a string, or of a list of parts of these kinds."""
    if isinstance(content, str):
        return content
    return JOINED_BY.join(part_text(part, f"{where}[{at}]", kinds) for at, part in enumerate(listed(content, where)))


def part_text(part: object, where: str, kinds: frozenset[str]) -> str:
    match part:
        case {"type": str(kind), "text": str(text)} if kind in kinds:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case _:
            raise unsupported(part, where)


def unsupported(part: object, where: str) -> BadRequest:
    kind = cast("dict[str, object]", part).get("type") if isinstance(part, dict) else None
    return BadRequest(f"{where} of type {kind!r} cannot be recorded: only text, thoughts, tool calls and results can")


def listed(value: object, where: str) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequest(f"{where} must be a list")
    return cast("list[object]", value)


def mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{where} must be an object")
    return cast("dict[str, Any]", value)


def with_system(texts: Sequence[str], messages: Sequence[Message]) -> list[Message]:
    """One system message at the beginning: most chat templates accept no second one there."""
    leading = 0
    while leading < len(messages) and messages[leading]["role"] == "system":
        leading += 1
    joined = JOINED_BY.join(filter(None, [*texts, *(message["content"] for message in messages[:leading])]))
    return [*([{"role": "system", "content": joined}] if joined else []), *messages[leading:]]


def function_tool(name: object, description: object, parameters: object) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def tool_call(id: str, name: str, arguments: str) -> Message:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def json_format(name: object, schema: object, strict: object = None) -> dict[str, Any]:
    wanted = {"name": name or "response", "schema": schema} | ({} if strict is None else {"strict": strict})
    return {"type": "json_schema", "json_schema": wanted}


def arguments_object(text: str) -> dict[str, Any]:
    """A call's arguments for an API that has them as an object."""
    try:
        value = orjson.loads(text or "{}")
        within = lambda: [[[[[value]]]]]  # noqa: E731  as deep as it is when the client returns it
        if isinstance(value, dict) and not is_nested_too_deeply(b"[[[[[" + text.encode(), within):
            return cast("dict[str, Any]", value)
    except (orjson.JSONDecodeError, UnicodeEncodeError):
        pass
    return {UNPARSED: text}


def arguments_text(value: Fields) -> str:
    """The inverse of `arguments_object`, up to white space."""
    raw = value.get(UNPARSED)
    return raw if len(value) == 1 and isinstance(raw, str) else dumped(value)


def dumped(value: object) -> str:
    """Print JSON like chat templates."""
    return json.dumps(value, ensure_ascii=False)


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _object(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}

"""Tools that a policy may call: functions with annotations, each with a time limit, all calls of a turn at once.

What the policy did wrong is told to it, so that it can do better; what Penstock's own errors say passes.
"""

import asyncio
import functools
import inspect
import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NotRequired, cast, get_type_hints, overload

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_json
from typing_extensions import TypedDict

from penstock.environments.protocol import Completion, Message, ToolCall
from penstock.errors import ConfigError, PenstockError
from penstock.runtime.offload import in_io_thread

logger = logging.getLogger("penstock.environments")

TIMEOUT_S = 30.0
# One answer may ask for thousands of calls; its neighbours want their threads and connections, too.
AT_ONCE = 8
NAME_CHARACTERS = 100


class _Untitled(GenerateJsonSchema):
    """A title repeats its field's name, in tokens of every prompt."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class Tool:
    """Made by `@tool`; of a method, `instance.method` is the tool of that instance."""

    function: Callable[..., Any]
    arguments: TypeAdapter[dict[str, Any]]
    schema: Mapping[str, Any]
    """as a request has it"""
    timeout_s: float
    is_method: bool
    is_async: bool

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        return self.function(*arguments, **more)

    def __get__(self, instance: object | None, owner: type | None = None) -> "Tool":
        if instance is None or not self.is_method:
            return self
        return replace(self, function=functools.partial(self.function, instance), is_method=False)

    async def answer(self, arguments: Mapping[str, Any]) -> str:
        if self.is_async:
            found = await self.function(**arguments)
        else:
            found = await in_io_thread(self.function, **arguments)
        return found if isinstance(found, str) else to_json(found).decode()


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(*, timeout_s: float = TIMEOUT_S) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(function: Callable[..., Any] | None = None, /, *, timeout_s: float = TIMEOUT_S) -> Any:
    """A function or method as a tool: its name, its docstring, and its annotations, by which arguments are checked.

    A coroutine runs on the loop; a plain function in a thread, which nothing can stop: after its time only the waiting
    ends. ValueError is for what the policy did wrong.
    """
    if function is None:
        return functools.partial(_made, timeout_s=timeout_s)
    return _made(function, timeout_s=timeout_s)


def _made(function: Callable[..., Any], *, timeout_s: float) -> Tool:
    parameters = dict(inspect.signature(function).parameters)
    is_method = next(iter(parameters), None) == "self"
    if is_method:
        del parameters["self"]
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if name not in hints or parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"the tool {function.__name__} must have a parameter {name} that is plain and annotated")
        fields[name] = hints[name] if parameter.default is parameter.empty else NotRequired[hints[name]]
    kind = cast("Any", TypedDict)(function.__name__, fields)
    kind.__pydantic_config__ = ConfigDict(extra="forbid")
    arguments = TypeAdapter[dict[str, Any]](kind)
    schema = arguments.json_schema(schema_generator=_Untitled)
    del schema["title"]
    described = {"name": function.__name__, "description": inspect.getdoc(function) or "", "parameters": schema}
    return Tool(
        function=function,
        arguments=arguments,
        schema={"type": "function", "function": described},
        timeout_s=timeout_s,
        is_method=is_method,
        is_async=inspect.iscoroutinefunction(function),
    )


class Tools:
    """Those of one rollout: `messages += [reply.message, *await tools.answer(reply)]`."""

    def __init__(self, *tools: Tool, at_once: int = AT_ONCE) -> None:
        self._tools = {each.name: each for each in tools}
        self._turns = asyncio.Semaphore(at_once)
        self.calls = 0
        self.errors = 0
        """calls that were answered with `error: ...`"""

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """For `policy.chat(messages, tools=...)`."""
        return [each.schema for each in self._tools.values()]

    async def answer(self, reply: Completion) -> list[Message]:
        """A message for each tool call of the reply, in their order. All run at once; a failure that is not the
        policy's ends the others."""
        calls = reply.tool_calls
        try:
            async with asyncio.TaskGroup() as group:
                contents = [group.create_task(self._content(call)) for call in calls]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [
            {"role": "tool", "tool_call_id": call.id, "content": content.result()}
            for call, content in zip(calls, contents, strict=True)
        ]

    async def _content(self, call: ToolCall) -> str:
        self.calls += 1
        called = self._tools.get(call.name)
        if called is None:
            there = ", ".join(self._tools)
            return self._error(f"there is no tool {call.name[:NAME_CHARACTERS]}; there are {there}")
        try:
            arguments = called.arguments.validate_json(call.text or "{}", strict=True)
        except ValidationError as error:
            return self._error(f"{called.name}: {_wrong(error)}")
        async with self._turns:
            return await self._answer(called, arguments)

    async def _answer(self, called: Tool, arguments: Mapping[str, Any]) -> str:
        limit = asyncio.timeout(called.timeout_s)
        try:
            async with limit:
                return await called.answer(arguments)
        except PenstockError:
            raise
        except ValueError as error:
            return self._error(str(error))
        except Exception as error:  # noqa: BLE001 - the policy reads it, and whoever wrote the tool, once
            if limit.expired():
                return self._error(f"{called.name} took longer than {called.timeout_s:g} s")
            frame = traceback.extract_tb(error.__traceback__)[-1]
            _warn_once(called.name, type(error).__name__, f"{frame.filename}, line {frame.lineno}")
            return self._error(f"{type(error).__name__}: {error}")

    def _error(self, what: str) -> str:
        self.errors += 1
        return f"error: {what}"


def _wrong(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(": ".join([*map(str, each["loc"]), each["msg"]]) for each in found)


@functools.lru_cache(maxsize=1_000)
def _warn_once(name: str, error: str, where: str) -> None:
    logger.warning("action=tool_failed tool=%s error=%s where=%r: the policy was told so", name, error, where)

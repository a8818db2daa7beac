"""Tools that a policy may call: annotated functions with a time limit each. The calls of one turn
run concurrently.

Invalid calls and exceptions become `error: ...` messages to the policy; Headpond's own errors
propagate.
"""

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NotRequired, cast, get_type_hints, overload

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_json
from typing_extensions import TypedDict

from headpond.environments.protocol import Completion, ToolCall
from headpond.errors import ConfigError, HeadpondError, raised_at
from headpond.event_loop.offload import in_io_thread
from headpond.spans import timed
from headpond.turn import Message

logger = logging.getLogger("headpond.environments")

TIMEOUT_S = 30.0
# Concurrent calls per rollout. One completion may contain thousands of calls, and rollouts share
# threads and connections.
MAX_CONCURRENT_CALLS = 8
# Limit for an unknown tool's name in the error message.
MAX_NAME_CHARACTERS = 100


class _WithoutTitles(GenerateJsonSchema):
    """A schema without titles: Pydantic's repeat the field names and cost tokens in every
    prompt."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool, created by `@tool`. `instance.method` is the tool bound to that instance."""

    function: Callable[..., Any]
    arguments: TypeAdapter[dict[str, Any]]
    schema: Mapping[str, Any]
    """The schema as in a chat request."""
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

    async def run(self, arguments: Mapping[str, Any]) -> str:
        """Run the tool and return the content of the tool message: a string as it is, anything
        else as JSON."""
        if self.is_async:
            result = await self.function(**arguments)
        else:
            result = await in_io_thread(self.function, **arguments)
        return result if isinstance(result, str) else to_json(result).decode()


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(*, timeout_s: float = TIMEOUT_S) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(function: Callable[..., Any] | None = None, /, *, timeout_s: float = TIMEOUT_S) -> Any:
    """Make a tool of a function or method. Its name, docstring and annotations describe it;
    annotations validate calls. Coroutine functions run on the loop, others in a thread. A thread
    cannot be interrupted: after `timeout_s` the call returns an error and the thread runs on.
    Raise ValueError for a mistake of the policy; it reads the message."""
    if function is None:
        return functools.partial(_make_tool, timeout_s=timeout_s)
    return _make_tool(function, timeout_s=timeout_s)


# Pydantic takes 1.4 ms for a schema, so it is made once, where the function is defined. Binding a
# tool to a rollout takes 10 us.
def _make_tool(function: Callable[..., Any], *, timeout_s: float) -> Tool:
    parameters = dict(inspect.signature(function).parameters)
    is_method = next(iter(parameters), None) == "self"
    if is_method:
        del parameters["self"]
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if name not in hints or parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"the tool {function.__name__}: the parameter {name} must be annotated and callable by keyword"
            )
        fields[name] = hints[name] if parameter.default is parameter.empty else NotRequired[hints[name]]
    typed_dict = cast("Any", TypedDict)(function.__name__, fields)
    typed_dict.__pydantic_config__ = ConfigDict(extra="forbid")
    arguments = TypeAdapter[dict[str, Any]](typed_dict)
    schema = arguments.json_schema(schema_generator=_WithoutTitles)
    del schema["title"]
    definition = {"name": function.__name__, "description": inspect.getdoc(function) or "", "parameters": schema}
    return Tool(
        function=function,
        arguments=arguments,
        schema={"type": "function", "function": definition},
        timeout_s=timeout_s,
        is_method=is_method,
        is_async=inspect.iscoroutinefunction(function),
    )


class Tools:
    """The tools of one rollout.

    `messages += [completion.message, *await tools.answer(completion)]`.
    """

    def __init__(self, *tools: Tool, at_once: int = MAX_CONCURRENT_CALLS) -> None:
        self._tools = {one_tool.name: one_tool for one_tool in tools}
        self._slots = asyncio.Semaphore(at_once)
        self.calls = 0
        self.errors = 0
        """Calls whose result was `error: ...`."""

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """The `tools` argument of `policy.chat`."""
        return [one_tool.schema for one_tool in self._tools.values()]

    async def answer(self, completion: Completion) -> list[Message]:
        """Run the tool calls of a completion concurrently and return a message for each, in
        order. A HeadpondError cancels the other calls and is raised."""
        calls = completion.tool_calls
        try:
            async with asyncio.TaskGroup() as group:
                contents = [group.create_task(self._content_of(call)) for call in calls]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [
            {"role": "tool", "tool_call_id": call.id, "content": content.result()}
            for call, content in zip(calls, contents, strict=True)
        ]

    async def _content_of(self, call: ToolCall) -> str:
        self.calls += 1
        called = self._tools.get(call.name)
        if called is None:
            names = ", ".join(self._tools)
            return self._error(f"there is no tool {call.name[:MAX_NAME_CHARACTERS]}; there are {names}")
        try:
            arguments = called.arguments.validate_json(call.text or "{}", strict=True)
        except ValidationError as error:
            return self._error(f"{called.name}: {_problems(error)}")
        async with self._slots:
            with timed("tool", called.name):
                return await self._run(called, arguments)

    async def _run(self, called: Tool, arguments: Mapping[str, Any]) -> str:
        limit = asyncio.timeout(called.timeout_s)
        try:
            async with limit:
                return await called.run(arguments)
        except HeadpondError:
            raise
        except ValueError as error:
            return self._error(str(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the policy gets it as a message, the log once
            if limit.expired():
                return self._error(f"{called.name} took longer than {called.timeout_s:g} s")
            _warn_once(called.name, type(error).__name__, raised_at(error))
            return self._error(f"{type(error).__name__}: {error}")

    def _error(self, problem: str) -> str:
        self.errors += 1
        return f"error: {problem}"


def _problems(error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(": ".join([*map(str, problem["loc"]), problem["msg"]]) for problem in problems)


@functools.lru_cache(maxsize=1_000)
def _warn_once(name: str, error: str, where: str) -> None:
    logger.warning("action=tool_failed tool=%s error=%s where=%r: the policy got an error message", name, error, where)

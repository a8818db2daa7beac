"""A model's chat template by Hugging Face's conventions: messages -> text, in Jinja's sandbox."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headpond.errors import BadRequest, ConfigError
from headpond.renderers.protocol import NO_VALUES, TemplateValues, Tools, content_text
from headpond.turn import Message


class Generation(Extension):
    """`{% generation %}` marks the assistant's text for loss masks. Here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A template with its `values`: the variables besides the messages, such as special tokens
    and configured arguments."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _json
        functions = {"raise_exception": _refuse, "strftime_now": _now}
        try:
            self._template = environment.from_string(source, globals=functions)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template has a syntax error in line {error.lineno}: {error.message}"
            ) from error
        self._values = dict(values)

    def text(
        self, messages: Sequence[Message], *, tools: Tools, generate: bool, values: TemplateValues = NO_VALUES
    ) -> str:
        """Render messages. `values` override the template's own. Raise BadRequest for messages
        that the template refuses."""
        plain = [_plain(message) for message in messages]
        try:
            return self._template.render(
                **{
                    **self._values,
                    **values,
                    "messages": plain,
                    "tools": tools or None,
                    "add_generation_prompt": generate,
                }
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise BadRequest(f"the chat template refuses these messages: {error}") from error


def _plain(message: Message) -> dict[str, Any]:
    """Convert a message to the form that templates expect: content as one string, arguments of
    tool calls parsed from JSON."""
    plain = {**message, "content": content_text(message.get("content"))}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_call(call) for call in calls]
    return plain


def _call(call: object) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(name), "arguments": str(text)}, **more}:
            return {**more, "function": {"name": name, "arguments": _parsed(text)}}
        case dict():
            return cast("dict[str, Any]", call)
        case _:
            raise BadRequest("each of a message's tool_calls needs a function with name and arguments")


def _parsed(text: str) -> object:
    """Parse arguments. Anything but a JSON object stays text: a policy may write anything."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return text
    return parsed if isinstance(parsed, dict) else text


def _json(value: object, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Encode JSON without the HTML escapes of Jinja's own filter: models were not trained on
    those."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _refuse(reason: str) -> str:
    raise jinja2.TemplateError(reason)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)

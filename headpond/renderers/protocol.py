"""The interface of renderers: messages <-> token ids for one model family. Synchronous (`pools.py` adds threads).

Token ids of earlier prompts and completions are kept where possible; `next_prompt` checks that for every renderer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from headpond.errors import BadRequest
from headpond.turn import Ids, Message

Tools = Sequence[Mapping[str, Any]] | None

NO_IDS: Ids = np.empty(0, np.int32)
NO_IDS.flags.writeable = False
TemplateValues = Mapping[str, Any]
"""A request's `chat_template_kwargs`: they override those of `policy.renderer`."""
NO_VALUES: TemplateValues = MappingProxyType({})


class Renderer(Protocol):
    """`render` and `bridge` have one caller at a time."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = None,
        generate: bool = True,
        values: TemplateValues = NO_VALUES,
    ) -> Ids:
        """The ids of a conversation; `generate` opens the assistant's next message. Raises BadRequest for messages that
        cannot be rendered."""
        ...

    def bridge(
        self,
        prompt_ids: Ids,
        completion_ids: Ids,
        new_messages: Sequence[Message],
        *,
        tools: Tools = None,
        values: TemplateValues = NO_VALUES,
    ) -> Ids | None:
        """The unchanged ids of the previous prompt and completion, then `new_messages`, then the opened next message.
        None if the renderer cannot guarantee that; the caller then renders the whole conversation."""
        ...

    def message(
        self,
        completion_ids: Ids,
        *,
        prompt_ids: Ids = NO_IDS,
        tools: Tools = None,
        values: TemplateValues = NO_VALUES,
    ) -> dict[str, Any]:
        """A completion as an assistant message. A tool call has an id only if the policy wrote one: the caller numbers
        the others. May be called concurrently."""
        ...

    def texts(self, ids: Ids) -> list[str]:
        """The text of each token alone. May be called concurrently."""
        ...


@dataclass(frozen=True, kw_only=True)
class NextTurn:
    """A conversation to complete, and the token ids of the previous turn, if there is one."""

    messages: Sequence[Message]
    tools: Tools = None
    prompt_ids: Ids = field(default_factory=lambda: NO_IDS)
    completion_ids: Ids = field(default_factory=lambda: NO_IDS)
    appended: int = 0
    """how many of the last `messages` follow the completion of the previous turn"""
    values: TemplateValues = field(default_factory=lambda: NO_VALUES)


def next_prompt(renderer: Renderer, turn: NextTurn) -> Ids:
    """The previous turn's ids bridged to the new messages; without a bridge that keeps them, the whole conversation
    rendered."""
    if len(turn.prompt_ids) and turn.appended:
        new_messages = turn.messages[-turn.appended :]
        ids = renderer.bridge(turn.prompt_ids, turn.completion_ids, new_messages, tools=turn.tools, values=turn.values)
        if ids is not None and begins_with(ids, turn.prompt_ids, turn.completion_ids):
            return ids
    return renderer.render(turn.messages, tools=turn.tools, values=turn.values)


def content_text(content: object) -> str:
    """A message's content as one string. Raises BadRequest if it is not text."""
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            return "".join(map(_part_text, content))
        case _:
            return _part_text(content)


def _part_text(part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case _:
            raise BadRequest("a message has content that is not text: only text parts are supported")


def begins_with(ids: Ids, *parts: Ids) -> bool:
    """Whether `ids` start with the concatenated parts and have more ids after them."""
    at = 0
    for part in parts:
        if not np.array_equal(ids[at : at + len(part)], part):
            return False
        at += len(part)
    return len(ids) > at

"""The interface of renderers: messages <-> token ids for one model family. Synchronous (`pools.py`
adds threads).

Renderers reuse the token ids of earlier prompts and completions if possible. `next_prompt`
checks every renderer's result.
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
"""A request's `chat_template_kwargs`. They override those of `policy.renderer`."""
NO_VALUES: TemplateValues = MappingProxyType({})


class Renderer(Protocol):
    """A renderer of one model family. `render` and `bridge` have one caller at a time."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = None,
        generate: bool = True,
        values: TemplateValues = NO_VALUES,
    ) -> Ids:
        """Return the ids of a conversation. `generate` opens the assistant's next message. Raise
        BadRequest for messages that cannot be rendered."""
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
        """Return the unchanged ids of the previous prompt and completion, then `new_messages`,
        then the opened next message. Return None if that cannot be guaranteed; the caller then
        renders the whole conversation."""
        ...

    def message(
        self,
        completion_ids: Ids,
        *,
        prompt_ids: Ids = NO_IDS,
        tools: Tools = None,
        values: TemplateValues = NO_VALUES,
    ) -> dict[str, Any]:
        """Return a completion as an assistant message. A tool call has an id only if the policy
        wrote one; the caller numbers the other calls. May be called concurrently."""
        ...

    def texts(self, ids: Ids) -> list[str]:
        """Return the text of each token alone. May be called concurrently."""
        ...


@dataclass(frozen=True, kw_only=True)
class NextTurn:
    """A conversation to complete, and the token ids of the previous turn, if there is one."""

    messages: Sequence[Message]
    tools: Tools = None
    prompt_ids: Ids = field(default_factory=lambda: NO_IDS)
    completion_ids: Ids = field(default_factory=lambda: NO_IDS)
    appended: int = 0
    """Number of last `messages` that follow the completion of the previous turn."""
    values: TemplateValues = field(default_factory=lambda: NO_VALUES)


def next_prompt(renderer: Renderer, turn: NextTurn) -> Ids:
    """Bridge the previous turn's ids to the new messages. Without a bridge that preserves them,
    render the whole conversation."""
    if len(turn.prompt_ids) and turn.appended:
        new_messages = turn.messages[-turn.appended :]
        ids = renderer.bridge(turn.prompt_ids, turn.completion_ids, new_messages, tools=turn.tools, values=turn.values)
        if ids is not None and begins_with(ids, turn.prompt_ids, turn.completion_ids):
            return ids
    return renderer.render(turn.messages, tools=turn.tools, values=turn.values)


def content_text(content: object) -> str:
    """Return a message's content as one string. Raise BadRequest if it is not text."""
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
    """Return whether `ids` start with the concatenated parts and have more ids after them."""
    at = 0
    for part in parts:
        if not np.array_equal(ids[at : at + len(part)], part):
            return False
        at += len(part)
    return len(ids) > at

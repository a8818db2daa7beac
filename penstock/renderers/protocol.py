"""What a renderer is: messages <-> token ids for one model family. Synchronous, for one encoding caller at a time.

Knows neither loops nor threads (`pools.py` does). Ids that a policy has read or said are never written anew where they
can be kept: `next_prompt` holds every renderer to that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from penstock.turn import Ids, Message

Tools = Sequence[Mapping[str, Any]] | None

NO_IDS: Ids = np.empty(0, np.int32)
NO_IDS.flags.writeable = False


class Renderer(Protocol):
    def render(self, messages: Sequence[Message], *, tools: Tools = None, generate: bool = True) -> Ids:
        """The ids of a conversation; `generate` opens the assistant's next message. BadRequest for what cannot be
        rendered."""
        ...

    def bridge(
        self, prompt_ids: Ids, completion_ids: Ids, new_messages: Sequence[Message], *, tools: Tools = None
    ) -> Ids | None:
        """The prompt and the completion of the turn before, unchanged, then `new_messages`, then the opened next
        message. None when the renderer cannot vouch for that: then everything is rendered again."""
        ...

    def message(self, completion_ids: Ids, *, prompt_ids: Ids = NO_IDS, tools: Tools = None) -> dict[str, Any]:
        """What was generated, as an assistant's message. Any number of callers at once."""
        ...


@dataclass(frozen=True, kw_only=True)
class NextTurn:
    """A conversation that is to be answered, and the tokens of the turn that it goes on from, where there is one."""

    messages: Sequence[Message]
    tools: Tools = None
    prompt_ids: Ids = field(default_factory=lambda: NO_IDS)
    completion_ids: Ids = field(default_factory=lambda: NO_IDS)
    appended: int = 0
    """how many of `messages`, the last ones, follow the answer that `completion_ids` are"""


def next_prompt(renderer: Renderer, turn: NextTurn) -> Ids:
    """The turn before and what follows it, or, where that cannot be had, the whole conversation rendered."""
    if len(turn.prompt_ids) and turn.appended:
        new_messages = turn.messages[-turn.appended :]
        ids = renderer.bridge(turn.prompt_ids, turn.completion_ids, new_messages, tools=turn.tools)
        if ids is not None and begins_with(ids, turn.prompt_ids, turn.completion_ids):
            return ids
    return renderer.render(turn.messages, tools=turn.tools)


def begins_with(ids: Ids, *parts: Ids) -> bool:
    """Whether `ids` are the parts, one behind the other, and more."""
    at = 0
    for part in parts:
        if not np.array_equal(ids[at : at + len(part)], part):
            return False
        at += len(part)
    return len(ids) > at

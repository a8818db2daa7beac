"""Turns that come without tokens: an engine that says only text, a conversation from elsewhere.

Only those are rendered; where every turn has its tokens, nothing is asked of a renderer, nor is one built.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.fingerprints import Ids
from penstock.renderers.protocol import Message, Renderer, Tools


@dataclass(frozen=True, kw_only=True)
class TurnTokens:
    prompt_ids: Ids
    completion_ids: Ids


@dataclass(frozen=True, kw_only=True)
class SaidTurn:
    messages: Sequence[Message]
    answer: Message
    tools: Tools = None
    tokens: TurnTokens | None = None
    """where the engine said them"""


def turn_tokens(renderer: Renderer, turn: SaidTurn) -> TurnTokens:
    """The conversation with its answer, as the template writes it, cut where a prompt for that answer would end.
    A template that writes a prompt otherwise than a past turn is cut where the two part."""
    prompt_ids = renderer.render(turn.messages, tools=turn.tools)
    whole_ids = renderer.render([*turn.messages, turn.answer], tools=turn.tools, generate=False)
    shared = min(len(prompt_ids), len(whole_ids))
    differs = prompt_ids[:shared] != whole_ids[:shared]
    cut = int(np.argmax(differs)) if differs.any() else shared
    return TurnTokens(prompt_ids=whole_ids[:cut], completion_ids=whole_ids[cut:])

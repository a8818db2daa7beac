"""Messages -> tokens in the session server: what was said is never tokenized again, only what is appended."""

from typing import Any

import numpy as np

from penstock.config import RunConfig
from penstock.errors import ConfigError, Invariant
from penstock.recording import Prepared
from penstock.renderers import NextTurn, PooledRenderer, RendererKey, RendererPools
from penstock.renderers.protocol import begins_with
from penstock.turn import Ids
from services.sessions.requests import Chat


def renderer_of(config: RunConfig) -> PooledRenderer | None:
    settings, dialect = config.policy.renderer, config.engine.dialect
    if settings is None:
        return None
    if dialect != "sglang":
        raise ConfigError(
            f"policy.renderer needs an engine whose chat takes tokens, and {dialect}'s does not: remove it, or set "
            'engine.dialect = "sglang"'
        )
    return PooledRenderer(RendererPools(), RendererKey.of(settings, config.engine.model))


async def prompt_ids(renderer: PooledRenderer, prepared: Prepared, chat: Chat) -> Ids:
    history_ids, answer_from = prepared.history_ids, prepared.answer_from
    tools: Any = chat.fields.get("tools")
    turn = NextTurn(
        messages=[dict(message) for message in chat.asked.messages],
        tools=tools,
        prompt_ids=history_ids[:answer_from],
        completion_ids=history_ids[answer_from:],
        appended=len(prepared.request.appended),
    )
    ids = np.ascontiguousarray(await renderer.prompt_ids(turn), np.int32)
    if len(history_ids) and not begins_with(ids, history_ids):
        raise Invariant(
            "the chat template rewrites earlier messages: for this model, remove policy.renderer and set "
            'sessions.mode = "open"'
        )
    return ids

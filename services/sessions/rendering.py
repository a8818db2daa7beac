"""Messages -> tokens in the session server: what was said is never tokenized again, only what is appended."""

from typing import Any

import numpy as np

from penstock.config import RunConfig
from penstock.config.engine import BYTES_CHATML, RendererSettings
from penstock.errors import ConfigError, Invariant
from penstock.recording import Prepared
from penstock.renderers import NextTurn, PooledRenderer, RendererKey, RendererPools
from penstock.renderers.protocol import begins_with
from penstock.turn import Ids
from services.sessions.requests import Chat


def renderer_of(config: RunConfig) -> PooledRenderer | None:
    tokenizer, dialect = config.sessions.tokenizer, config.engine.dialect
    if tokenizer is None:
        return None
    if dialect != "sglang":
        raise ConfigError(f'a tokenizer needs engine.dialect = "sglang": a chat of {dialect} takes no tokens')
    if tokenizer == "bytes":
        settings = RendererSettings(backend=BYTES_CHATML, model=BYTES_CHATML)
    else:
        settings = RendererSettings(model=str(tokenizer))
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
        raise Invariant("the chat template writes what was said anew: use mode open and no tokenizer with this model")
    return ids

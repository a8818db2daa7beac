"""Messages -> tokens in the session server: what was said is never tokenized again, only what is appended."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock import bytes_chatml
from penstock.config import RunConfig
from penstock.environments.protocol import Message
from penstock.errors import ConfigError
from penstock.fingerprints import Ids
from penstock.policy import Renderer
from penstock.policy.dialects import Tools
from penstock.recording import Prepared
from services.sessions.requests import Chat


class BytesRenderer:
    """ChatML over bytes: needs no files."""

    async def prompt_ids(self, history_ids: Ids, messages: Sequence[Message], tools: Tools) -> Ids:
        return bytes_chatml.encode_next(history_ids, messages, tools=tools)

    async def message(self, completion_ids: Ids) -> Message:
        return bytes_chatml.decode_answer(completion_ids)


def renderer_of(config: RunConfig) -> Renderer | None:
    tokenizer, dialect = config.sessions.tokenizer, config.engine.dialect
    if tokenizer is None:
        return None
    if tokenizer != "bytes":
        raise ConfigError(f"--tokenizer {tokenizer}: only the built-in one is there; write --tokenizer bytes")
    if dialect != "sglang":
        raise ConfigError(f'a tokenizer needs engine.dialect = "sglang": a chat of {dialect} takes no tokens')
    return BytesRenderer()


async def prompt_ids(renderer: Renderer, prepared: Prepared, chat: Chat) -> Ids:
    history_ids = prepared.history_ids
    new = prepared.request.appended if len(history_ids) else chat.asked.messages
    tools: Any = chat.fields.get("tools")
    ids = await renderer.prompt_ids(history_ids, [dict(message) for message in new], tools)
    return np.ascontiguousarray(ids, np.int32)

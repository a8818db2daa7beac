"""Logprobs for a client whose engine names tokens by id: the renderer gives their texts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from headpond.engines.dialects.base import AsyncRenderer, TokenChoice


async def rendered_logprobs(
    renderer: AsyncRenderer, tokens: Sequence[TokenChoice], fields: Mapping[str, Any]
) -> bytes | None:
    """As OpenAI's API has them, with as many alternatives as the request's `top_logprobs`."""
    if not tokens:
        return None
    given = fields.get("top_logprobs")
    ranks = given if isinstance(given, int) else 0
    ids = sorted({token.id for token in tokens} | {id for token in tokens for id, _ in token.top[:ranks]})
    texts = dict(zip(ids, await renderer.texts(np.array(ids, np.int32)), strict=True))
    content = [
        _entry(texts[token.id], token.logprob)
        | {"top_logprobs": [_entry(texts[id], logprob) for id, logprob in token.top[:ranks]]}
        for token in tokens
    ]
    return orjson.dumps({"content": content})


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

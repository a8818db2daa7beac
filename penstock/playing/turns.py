"""What the recorded policy and the session server share about a turn: the prompt's tokens, a message made by the
renderer, and the turn's metadata."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.engines.dialects.base import AsyncRenderer, Dialect, Prompt
from penstock.engines.replicas import Replica, Replicas
from penstock.engines.sampling import altered_sampling
from penstock.errors import Upstream
from penstock.recording import Prepared
from penstock.renderers import NextTurn
from penstock.renderers.protocol import Tools
from penstock.turn import Ids, Mask, Message, SaidVersion, Turn, TurnMetadata


async def prompt_ids(renderer: AsyncRenderer, prepared: Prepared, messages: Sequence[Message], tools: Tools) -> Ids:
    """The prompt's tokens. Recorded tokens are reused and only appended messages are tokenized, unless the renderer
    cannot extend the previous turn: then the prompt may not begin with `prepared.history_ids`."""
    history_ids, answer_from = prepared.history_ids, prepared.answer_from
    turn = NextTurn(
        messages=messages,
        tools=tools,
        prompt_ids=history_ids[:answer_from],
        completion_ids=history_ids[answer_from:],
        appended=len(prepared.request.appended),
    )
    return np.ascontiguousarray(await renderer.prompt_ids(turn), np.int32)


async def rendered_message(dialect: Dialect, prompt: Prompt, turn: Turn) -> Message:
    """The completion of a turn without a message (token-in/token-out), decoded by the renderer."""
    if dialect.renderer is None or prompt.ids is None:
        raise Upstream("the engine's response has no message, and there is no policy.renderer to make one")
    rendered = await dialect.renderer.message(turn.completion_ids, prompt_ids=prompt.ids, tools=prompt.tools)
    return {"role": "assistant", **rendered}


async def named_adapter(dialect: Dialect, replicas: Replicas) -> tuple[str | None, SaidVersion | None]:
    """The model that a request names, and the version that this makes sure of; None where weights are not adapters."""
    label = await replicas.adapter()
    if label is None:
        return None, None
    return dialect.control.adapter_model(dialect.settings.model, label.text), SaidVersion(label.version, exact=True)


def turn_metadata(
    sampling: Mapping[str, Any],
    replica: Replica,
    *,
    version: SaidVersion,
    answered_at: float | None,
    agent: str = "",
    completion_mask: Mask | None = None,
) -> TurnMetadata:
    """`sampling` are the fields of the request."""
    temperature = sampling.get("temperature")
    return TurnMetadata(
        agent=agent,
        engine=replica.url,
        version=version,
        answered_at=answered_at,
        temperature=1.0 if temperature is None else float(temperature),
        sampling=altered_sampling(sampling),
        completion_mask=completion_mask,
    )

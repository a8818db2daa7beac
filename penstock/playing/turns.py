"""What the recorded policy and the session server share about a turn: the prompt's tokens, a message made by the
renderer, and the turn's metadata."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from penstock.engines.dialects.base import AsyncRenderer, Dialect, Prompt
from penstock.engines.replicas import Replica, Replicas
from penstock.engines.sampling import altered_sampling
from penstock.errors import BadRequest, Upstream
from penstock.recording import Prepared
from penstock.renderers import NextTurn
from penstock.renderers.protocol import NO_VALUES, TemplateValues, Tools, begins_with
from penstock.spans import Stopwatch
from penstock.turn import Ids, Mask, Message, SaidVersion, Turn, TurnMetadata

TEMPLATE_VALUES = "chat_template_kwargs"


async def prompt_of(
    renderer: AsyncRenderer | None,
    prepared: Prepared,
    messages: Sequence[Message],
    *,
    tools: Tools,
    fields: Mapping[str, Any],
) -> Prompt:
    """The prompt of a request with these `fields`. With a renderer it has tokens: recorded ones are reused and only
    appended messages are tokenized, unless the renderer cannot extend the previous turn."""
    if renderer is None:
        return Prompt(messages=messages, tools=tools)
    values = fields.get(TEMPLATE_VALUES) or NO_VALUES
    if not isinstance(values, Mapping):
        raise BadRequest(f"{TEMPLATE_VALUES} must be an object")
    ids = await _prompt_ids(renderer, prepared, messages, tools, cast("TemplateValues", values))
    kept = begins_with(ids, prepared.history_ids)
    return Prompt(
        messages=messages,
        tools=tools,
        ids=ids,
        values=cast("TemplateValues", values),
        routes_from=prepared.routes_from if kept else 0,
        rewritten=not kept,
    )


async def _prompt_ids(
    renderer: AsyncRenderer, prepared: Prepared, messages: Sequence[Message], tools: Tools, values: TemplateValues
) -> Ids:
    history_ids, answer_from = prepared.history_ids, prepared.answer_from
    turn = NextTurn(
        messages=messages,
        tools=tools,
        prompt_ids=history_ids[:answer_from],
        completion_ids=history_ids[answer_from:],
        appended=len(prepared.request.appended),
        values=values,
    )
    return np.ascontiguousarray(await renderer.prompt_ids(turn), np.int32)


async def rendered_message(
    dialect: Dialect, prompt: Prompt, turn: Turn, *, number: int, fields: Mapping[str, Any]
) -> Message:
    """The completion of a turn without a message (token-in/token-out), decoded by the renderer. The turn's number in
    its session makes the ids of its tool calls unique there; `fields` are those of the request."""
    if dialect.renderer is None or prompt.ids is None:
        raise Upstream("the engine's response has no message, and there is no policy.renderer to make one")
    rendered = await dialect.renderer.message(
        turn.completion_ids, prompt_ids=prompt.ids, tools=prompt.tools, values=prompt.values
    )
    rendered = _stopped(rendered, fields.get("stop"))
    if calls := rendered.get("tool_calls"):
        numbered = [{"id": f"call_{number}_{position}", **call} for position, call in enumerate(calls)]
        rendered = {**rendered, "tool_calls": numbered}
    return {"role": "assistant", **rendered}


def _stopped(message: Message, stop: object) -> Message:
    """The message without a string that ended it, and what its token has behind that."""
    content, strings = message.get("content"), [stop] if isinstance(stop, str) else stop
    if not isinstance(content, str) or not isinstance(strings, list | tuple):
        return message
    found = [content.find(each) for each in cast("Sequence[object]", strings) if isinstance(each, str) and each]
    ends = [at for at in found if at >= 0]
    return {**message, "content": content[: min(ends)]} if ends else message


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
    request: Stopwatch,
    agent: str = "",
    completion_mask: Mask | None = None,
) -> TurnMetadata:
    """`sampling` are the fields of the request; `request` took its time."""
    temperature = sampling.get("temperature")
    return TurnMetadata(
        agent=agent,
        engine=replica.url,
        version=version,
        answered_at=answered_at,
        begun_at=request.begun_at,
        seconds=request.seconds,
        temperature=1.0 if temperature is None else float(temperature),
        sampling=altered_sampling(sampling),
        completion_mask=completion_mask,
    )

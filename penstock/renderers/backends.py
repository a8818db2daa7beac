"""Which renderer a key means, and how it is built. Building is slow, and touches nothing that the process shares."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.renderers import bytes_chatml
from penstock.renderers.process_renderer import ProcessRenderer
from penstock.renderers.protocol import NO_IDS, Renderer, Tools
from penstock.turn import Ids, Message

if TYPE_CHECKING:
    from penstock.config.engine import RendererSettings


@dataclass(frozen=True, kw_only=True)
class RendererKey:
    """What makes two renderers the same. Texts are JSON, its keys in order."""

    backend: str
    model: str
    """whose tokens they are"""
    options: str = "{}"
    template: str = "{}"

    @classmethod
    def of(cls, settings: "RendererSettings", request_model: str, *, evaluation: bool = False) -> "RendererKey":
        """Training requests share the renderer of the pinned model, whichever adapter they ask for. Without a pin, and
        in evaluation, every request's model has its own."""
        pinned = None if evaluation else settings.model
        return cls(
            backend=settings.backend,
            model=pinned or request_model,
            options=_text(settings.options),
            template=_text(settings.chat_template_kwargs),
        )


def build(key: RendererKey) -> Renderer:
    """Blocks, for as long as a tokenizer takes to be read. ConfigError for what will never work,
    InfrastructureFailure for what may work the next time."""
    if key.backend == "bytes-chatml":
        return BytesChatml()
    return ProcessRenderer(
        backend=key.backend, model=key.model, options=json.loads(key.options), template=json.loads(key.template)
    )


class BytesChatml:
    """`penstock.renderers.bytes_chatml`. Has no state and needs no files."""

    def render(self, messages: Sequence[Message], *, tools: Tools = None, generate: bool = True) -> Ids:
        return bytes_chatml.encode(messages, tools=tools, generate=generate)

    def bridge(
        self, prompt_ids: Ids, completion_ids: Ids, new_messages: Sequence[Message], *, tools: Tools = None
    ) -> Ids | None:
        return bytes_chatml.encode_next(np.concatenate([prompt_ids, completion_ids]), new_messages)

    def message(self, completion_ids: Ids, *, prompt_ids: Ids = NO_IDS, tools: Tools = None) -> dict[str, Any]:
        return bytes_chatml.decode_answer(completion_ids)


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True)

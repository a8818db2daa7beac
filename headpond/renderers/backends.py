"""`RendererKey` identifies a renderer; `build` creates it. Building is slow and changes no global state."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headpond.renderers.bytes_chatml import BytesChatmlRenderer
from headpond.renderers.process_renderer import ProcessRenderer
from headpond.renderers.protocol import Renderer

if TYPE_CHECKING:
    from headpond.config.engine import RendererSettings


@dataclass(frozen=True, kw_only=True)
class RendererKey:
    """Equal keys share a renderer. `options` and `template` are JSON with sorted keys."""

    backend: str
    model: str
    """directory of the tokenizer; unused by bytes-chatml"""
    options: str = "{}"
    template: str = "{}"

    @classmethod
    def of(cls, settings: "RendererSettings", request_model: str, *, evaluation: bool = False) -> "RendererKey":
        """Training requests share the renderer of the pinned model, whichever adapter they name. Without a pinned
        model, and in evaluation, each request's model has its own renderer."""
        pinned = None if evaluation else settings.model
        return cls(
            backend=settings.backend,
            model=pinned or request_model,
            options=_sorted_json(settings.options),
            template=_sorted_json(settings.chat_template_kwargs),
        )


def build(key: RendererKey) -> Renderer:
    """Blocks while the tokenizer is read. Raises ConfigError for a permanent problem, InfrastructureFailure for one
    that a retry may solve."""
    if key.backend == "bytes-chatml":
        return BytesChatmlRenderer()
    return ProcessRenderer(
        backend=key.backend, model=key.model, options=json.loads(key.options), template=json.loads(key.template)
    )


def _sorted_json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True)

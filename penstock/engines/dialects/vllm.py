"""vLLM's chat API. The response has `token_ids`, `logprobs` and `routed_experts` on the choice."""

from typing import Any

from penstock.config.engine import Engine
from penstock.engines.dialects.base import AsyncRenderer, Dialect
from penstock.errors import ConfigError
from penstock.turn import Ids


class Vllm(Dialect):
    def __init__(self, settings: Engine, *, renderer: AsyncRenderer | None = None) -> None:
        if renderer is not None:
            raise ConfigError(
                'engine.dialect = "vllm" sends messages and cannot use policy.renderer: remove it, or set '
                'engine.dialect = "generate"'
            )
        super().__init__(settings)

    def required_fields(self, ids: Ids | None = None, routes_from: int = 0) -> dict[str, Any]:
        """Routed experts have no field: vLLM sends them if started with `--enable-return-routed-experts`."""
        return {"logprobs": True, "return_token_ids": True}

"""Token-in/token-out: vLLM's `/inference/v1/generate`. The response has no message, and names tokens by their id."""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from penstock.config.engine import Engine
from penstock.engines.dialects.base import (
    AsyncRenderer,
    Dialect,
    Endpoint,
    Prompt,
    ResponseBody,
    TokenLogprob,
    TokenLogprobs,
)
from penstock.errors import ConfigError, Upstream
from penstock.turn import Ids, ids_text


class NamedLogprob(TokenLogprob, gc=False):
    token: str
    """`token_id:<id>`"""


class NamedLogprobs(TokenLogprobs[NamedLogprob]):
    def check_tokens(self, ids: Ids) -> None:
        names = b"token_id:" + ids_text(ids).replace(b",", b",token_id:") if len(ids) else b""
        if ",".join([token.token for token in self.content]).encode() != names:
            raise Upstream("the engine's response has logprobs of other tokens than its token_ids")


class Generate(Dialect):
    endpoint: ClassVar[Endpoint] = Endpoint.GENERATE
    decoder: ClassVar["msgspec.json.Decoder[ResponseBody[Any]]"] = msgspec.json.Decoder(ResponseBody[NamedLogprobs])

    def __init__(self, settings: Engine, *, renderer: AsyncRenderer | None = None) -> None:
        if renderer is None:
            raise ConfigError('engine.dialect = "generate" sends tokens and needs a renderer: set policy.renderer')
        super().__init__(settings, renderer=renderer)

    def request_fields(self, prompt: Prompt, sampling: Mapping[str, Any]) -> dict[str, Any]:
        assert prompt.ids is not None
        required = self.required_fields(prompt.ids, prompt.routes_from)
        return {"token_ids": prompt.ids, "sampling_params": {**sampling, **required}}

    def required_fields(self, ids: Ids | None = None, routes_from: int = 0) -> dict[str, Any]:
        """Of `sampling_params`."""
        routes = {"routed_experts_prompt_start": routes_from} if self.settings.routed_experts else {}
        return {"logprobs": 1, **routes}

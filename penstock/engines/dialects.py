"""What is asked of an engine, in its own words: vLLM's chat, SGLang's chat, or tokens in and tokens out.

Everything that training needs (ids, logprobs, routed experts) is asked for here and cannot be switched off.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from penstock.config.engine import Engine
from penstock.engines.response_fields import Endpoint
from penstock.environments.protocol import Message
from penstock.errors import BadRequest, ConfigError
from penstock.renderers.protocol import NextTurn, Tools
from penstock.turn import Ids


class Renderer(Protocol):
    """Messages <-> tokens, where the engine is not asked to do it; `penstock.renderers` has one."""

    async def prompt_ids(self, turn: NextTurn) -> Ids:
        """The tokens of the turn before, unchanged, and then those of the messages that follow; where that cannot be
        had, those of all messages."""
        ...

    async def message(self, completion_ids: Ids, *, prompt_ids: Ids, tools: Tools) -> Message:
        """What was generated, as an assistant's message."""
        ...


@dataclass(frozen=True, kw_only=True)
class Prompt:
    messages: Sequence[Message]
    tools: Tools = None
    ids: Ids | None = None
    """where a renderer made them"""
    routes_from: int = 0
    """the first routed row that is wanted; 0 unless `ids` begin with those of the turn before"""


class Dialect:
    """Made once a process."""

    def __init__(self, settings: Engine, *, renderer: Renderer | None = None) -> None:
        if settings.dialect == "generate" and renderer is None:
            raise ConfigError('engine.dialect = "generate" takes tokens, and there is no renderer: set policy.renderer')
        if settings.dialect == "vllm" and renderer is not None:
            raise ConfigError(
                'engine.dialect = "vllm" takes messages, and policy.renderer would be of no use: take it away, or set '
                'engine.dialect = "generate"'
            )
        self.renderer = renderer
        self._settings = settings
        self._write = self._generate if settings.dialect == "generate" else self._chat
        self.endpoint = Endpoint.GENERATE if settings.dialect == "generate" else Endpoint.CHAT

    def body(self, prompt: Prompt, sampling: Mapping[str, Any]) -> bytes:
        try:
            request = {"model": self._settings.model, **self._write(prompt, sampling)}
            return orjson.dumps(request, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:
            raise BadRequest(f"the request holds what JSON cannot: {error}") from error

    def demanded(self, ids: Ids | None = None, routes_from: int = 0) -> dict[str, Any]:
        """The fields of a chat without which its answer could not be recorded. In vLLM's dialect, routed experts come
        when the server was started with `--enable-return-routed-experts`."""
        if self._settings.dialect == "vllm":
            return {"logprobs": True, "return_token_ids": True}
        asked: dict[str, Any] = {"logprobs": True, "return_meta_info": True, "return_prompt_token_ids": True}
        if ids is not None:
            asked["input_ids"] = ids
        if self._settings.routed_experts:
            asked |= {"return_routed_experts": True, "routed_experts_start_len": routes_from}
        return asked

    def _chat(self, prompt: Prompt, sampling: Mapping[str, Any]) -> dict[str, Any]:
        tools = {"tools": prompt.tools} if prompt.tools else {}
        return {"messages": prompt.messages, **tools, **sampling, **self.demanded(prompt.ids, prompt.routes_from)}

    def _generate(self, prompt: Prompt, sampling: Mapping[str, Any]) -> dict[str, Any]:
        assert prompt.ids is not None
        params = {**sampling, "logprobs": 1}
        if self._settings.routed_experts:
            params["routed_experts_prompt_start"] = prompt.routes_from
        return {"token_ids": prompt.ids, "sampling_params": params}

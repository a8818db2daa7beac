"""The servers that Penstock can use, by `engine.dialect`: one class per module owns the request and the response.

Everything that training needs (ids, logprobs, routed experts) is requested here and cannot be switched off.
"""

from dataclasses import dataclass

import msgspec

from penstock.config.engine import Engine
from penstock.engines.dialects.base import ABSENT, AsyncRenderer, Dialect, Endpoint, Prompt, read_message
from penstock.engines.dialects.generate import Generate
from penstock.engines.dialects.sglang import Sglang
from penstock.engines.dialects.vllm import Vllm
from penstock.turn import Ids, Logprobs

__all__ = ["AsyncRenderer", "Dialect", "Endpoint", "Prompt", "ResponseFields", "dialect_of", "read_response"]

DIALECTS: dict[str, type[Dialect]] = {"vllm": Vllm, "sglang": Sglang, "generate": Generate}


def dialect_of(settings: Engine, *, renderer: AsyncRenderer | None = None) -> Dialect:
    """ConfigError if the dialect needs a renderer and has none, or cannot use one."""
    return DIALECTS[settings.dialect](settings, renderer=renderer)


@dataclass(frozen=True, kw_only=True)
class ResponseFields:
    """The parts of one response. The completion is checked; raw parts are ABSENT if the server did not send them."""

    prompt_ids: msgspec.Raw
    completion_ids: Ids
    completion_logprobs: Logprobs
    routed_experts: msgspec.Raw
    finish_reason: str | None
    version: int | None
    message: bytes | None
    """The assistant's message as JSON; None from token-in/token-out."""


def read_response(text: bytes, endpoint: Endpoint) -> ResponseFields:
    """Decode a response by type. vLLM and SGLang share the chat endpoint; `meta_info` marks a response as SGLang's."""
    if not text.isascii():
        text.decode()  # msgspec does not check the encoding of values that it skips
    dialect: type[Dialect] = Generate if endpoint is Endpoint.GENERATE else Vllm
    response = dialect.decoder.decode(text)
    choice = response.only_choice()
    if choice.meta_info is not None:
        dialect = Sglang
    completion_ids, logprobs = dialect.completion(choice)
    return ResponseFields(
        prompt_ids=choice.prompt_token_ids if response.prompt_token_ids == ABSENT else response.prompt_token_ids,
        completion_ids=completion_ids,
        completion_logprobs=logprobs,
        routed_experts=dialect.routed_experts(choice),
        finish_reason=choice.finish_reason,
        version=dialect.version(choice),
        message=read_message(choice) if endpoint is Endpoint.CHAT else None,
    )

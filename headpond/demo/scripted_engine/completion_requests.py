"""Requests of both endpoints, decoded and checked into a `CompletionRequest`. Raises BadRequest."""

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from headpond.demo.scripted_engine.options import Dialect
from headpond.engines.dialects.base import TokenId
from headpond.errors import BadRequest
from headpond.renderers import bytes_chatml
from headpond.turn import Ids

Tokens = Annotated[list[TokenId], msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Temperature = Annotated[float, msgspec.Meta(ge=0)]


class Sampling(msgspec.Struct):
    """Sampling parameters of `/inference/v1/generate`."""

    max_tokens: Positive | None = None
    seed: int | None = None
    n: int | None = 1
    temperature: Temperature | None = None
    top_k: int | None = None
    logprobs: int | None = None
    routed_experts_prompt_start: Count = 0


class GenerateRequest(msgspec.Struct):
    token_ids: Tokens
    sampling_params: Sampling
    request_id: str | None = None
    model: str | None = None
    stream: bool | None = False


class ChatRequest(msgspec.Struct):
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    model: str | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    seed: int | None = None
    n: int | None = 1
    temperature: Temperature | None = None
    stream: bool | None = False
    tools: list[dict[str, Any]] | None = None
    logprobs: bool | None = False
    # vLLM
    return_token_ids: bool | None = False
    routed_experts_prompt_start: Count = 0
    # SGLang
    input_ids: Tokens | None = None
    return_meta_info: bool = False
    return_prompt_token_ids: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: Count = 0
    rid: str | None = None


CHAT = msgspec.json.Decoder(ChatRequest)
GENERATE = msgspec.json.Decoder(GenerateRequest)
AnyRequest = TypeVar("AnyRequest", ChatRequest, GenerateRequest)


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """A request of either endpoint."""

    prompt_ids: Ids
    max_tokens: int | None
    seed: int | None
    model: str | None
    temperature: float | None = None
    top_k: int | None = None
    request_id: str | None = None
    logprobs: bool
    token_ids: bool  # whether the response repeats the prompt's ids
    meta_info: bool = False
    routed_experts: bool = True
    experts_from: int = 0  # first token whose experts are requested


def read_chat(body: bytes, dialect: Dialect, *, tools: bool = True) -> CompletionRequest:
    chat = _read(body, CHAT)
    _check_single(chat.n, chat.stream)
    sglang = dialect == "sglang"
    if chat.tools and not tools and not sglang:
        raise BadRequest('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
    if chat.input_ids and sglang:
        prompt_ids = np.array(chat.input_ids, np.int32)
    else:
        prompt_ids = bytes_chatml.encode(chat.messages, tools=chat.tools)
    return _checked(
        CompletionRequest(
            prompt_ids=prompt_ids,
            max_tokens=chat.max_completion_tokens or chat.max_tokens,
            seed=chat.seed,
            model=chat.model,
            temperature=chat.temperature,
            logprobs=bool(chat.logprobs),
            token_ids=bool(chat.return_prompt_token_ids if sglang else chat.return_token_ids),
            request_id=chat.rid if sglang else None,
            meta_info=chat.return_meta_info,
            routed_experts=chat.return_routed_experts if sglang else True,
            experts_from=chat.routed_experts_start_len if sglang else chat.routed_experts_prompt_start,
        )
    )


def read_generate(body: bytes) -> CompletionRequest:
    generate = _read(body, GENERATE)
    sampling = generate.sampling_params
    _check_single(sampling.n, generate.stream)
    return _checked(
        CompletionRequest(
            prompt_ids=np.array(generate.token_ids, np.int32),
            max_tokens=sampling.max_tokens,
            seed=sampling.seed,
            model=generate.model,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            request_id=generate.request_id,
            logprobs=sampling.logprobs is not None,
            token_ids=False,
            experts_from=sampling.routed_experts_prompt_start,
        )
    )


def _read(body: bytes, decoder: "msgspec.json.Decoder[AnyRequest]") -> AnyRequest:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"the request cannot be read: {error}") from None


def _check_single(n: int | None, stream: bool | None) -> None:
    if n not in (None, 1):
        raise BadRequest(f"n = {n}: this engine returns one choice; send {n} requests")
    if stream:
        raise BadRequest("stream = true is not supported: remove it")


def _checked(request: CompletionRequest) -> CompletionRequest:
    if request.experts_from > len(request.prompt_ids):
        raise BadRequest(
            f"routed experts are wanted from token {request.experts_from} on; the prompt has {len(request.prompt_ids)}"
        )
    return request

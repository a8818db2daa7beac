"""Response bodies as vLLM, SGLang and `/inference/v1/generate` write them: their fields, in their order, compact.

A body is a list of parts, mostly views of bytes that exist already; nothing large goes through a JSON encoder.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import orjson

from penstock.renderers.bytes_chatml import MESSAGE_END, MESSAGE_START, VOCABULARY
from penstock.turn import Ids, ids_text
from services.engine.expert_table import ExpertTable, Part
from services.engine.generation import LOGPROB_LEVELS, Generation
from services.engine.requests import CompletionRequest
from services.engine.settings import ExpertForm
from services.engine.weights import TokenSpan

CREATED = 1762300000
"""Seconds since 1970, constant: the same request gets the same bytes."""
SPECIAL = {MESSAGE_START: "<|im_start|>", MESSAGE_END: "<|im_end|>"}
Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ResponseContent:
    """What a body is made of."""

    request: CompletionRequest
    generation: Generation
    model: str
    spans: Sequence[TokenSpan]
    """which weights sampled which tokens"""
    experts: ExpertTable | None

    @property
    def sequence(self) -> Ids:
        return np.concatenate([self.request.prompt_ids, self.generation.completion_ids])


def vllm_chat_body(content: ResponseContent) -> list[Part]:
    generation, request = content.generation, content.request
    message: Json = {"role": "assistant", "content": generation.message["content"], "refusal": None}
    message |= {
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": _tool_calls(generation),
        "reasoning": None,
    }
    ids = _ids(generation.completion_ids) if request.token_ids else b"null"
    prompt_ids = _ids(request.prompt_ids) if request.token_ids else b"null"
    return [
        b'{"id":"chatcmpl-%b","object":"chat.completion","created":%d,"model":%b,"choices":[{"index":0,"message":%b'
        % (generation.id.encode(), CREATED, orjson.dumps(content.model), orjson.dumps(message)),
        b',"logprobs":%b' % _logprobs(content, _vllm_token),
        b',"finish_reason":"%b","stop_reason":null,"token_ids":%b' % (generation.finish_reason.encode(), ids),
        *(_routed_experts(content, ExpertForm.NPY) or [b',"routed_experts":null']),
        b'}],"service_tier":null,"system_fingerprint":null,"usage":%b' % orjson.dumps(_usage(content)),
        b',"prompt_logprobs":null,"prompt_token_ids":%b,"kv_transfer_params":null}' % prompt_ids,
    ]


def sglang_chat_body(content: ResponseContent) -> list[Part]:
    generation, request = content.generation, content.request
    message: Json = {"role": "assistant", "content": generation.message["content"], "reasoning_content": None}
    message |= {"tool_calls": _tool_calls(generation) or None}
    matched = b"null" if generation.cut else b"%d" % MESSAGE_END
    return [
        b'{"id":"%b","object":"chat.completion","created":%d,"model":%b,"choices":[{"index":0,"message":%b'
        % (generation.id.encode(), CREATED, orjson.dumps(content.model), orjson.dumps(message)),
        b',"logprobs":%b' % _logprobs(content, _sglang_token),
        b',"finish_reason":"%b","matched_stop":%b' % (generation.finish_reason.encode(), matched),
        b',"prompt_token_ids":%b' % _ids(request.prompt_ids) if request.token_ids else b"",
        *(_sglang_meta_info(content) if request.meta_info else []),
        b'}],"usage":%b' % orjson.dumps(_usage(content) | {"reasoning_tokens": 0}),
        b',"metadata":{"weight_version":%b}}' % _label(content),
    ]


def _sglang_meta_info(content: ResponseContent) -> list[Part]:
    generation, request = content.generation, content.request
    tokens = len(generation.completion_ids)
    ended: Json = {"type": "length", "length": tokens} if generation.cut else {"type": "stop", "matched": MESSAGE_END}
    if generation.finish_reason == "abort":
        ended = {"type": "abort", "message": "Aborted"}
    return [
        b',"meta_info":{"id":"%b","finish_reason":%b,"prompt_tokens":%d,"weight_version":%b,"weight_versions":%b'
        % (
            generation.id.encode(),
            orjson.dumps(ended),
            len(request.prompt_ids),
            _label(content),
            _weight_versions(content),
        ),
        b',"total_retractions":0',
        b',"output_token_logprobs":[%b]' % _tokens(generation, _sglang_pair) if request.logprobs else b"",
        b',"completion_tokens":%d,"cached_tokens":0' % tokens,
        *_routed_experts(content, ExpertForm.BARE),
        b',"e2e_latency":%b}' % orjson.dumps(generation.latency_s),
    ]


def generate_body(content: ResponseContent) -> list[Part]:
    generation = content.generation
    return [
        b'{"request_id":%b,"choices":[{"index":0' % orjson.dumps(content.request.request_id or generation.id),
        b',"logprobs":%b' % _logprobs(content, _named_token),
        b',"finish_reason":"%b"' % (generation.finish_reason.encode() if generation.ended_early else b"stop"),
        b',"token_ids":%b' % _ids(generation.completion_ids),
        *(_routed_experts(content, ExpertForm.OBJECT) or [b',"routed_experts":null']),
        b',"weight_versions":%b' % _weight_versions(content),
        b'}],"prompt_logprobs":null,"kv_transfer_params":null,"usage":%b}' % orjson.dumps(_usage(content)),
    ]


def _label(content: ResponseContent) -> bytes:
    return orjson.dumps(content.spans[-1].state.label)


def _weight_versions(content: ResponseContent) -> bytes:
    return orjson.dumps([{"version": span.state.label, "start": span.start, "end": span.end} for span in content.spans])


def _ids(ids: Ids) -> bytes:
    return b"[%b]" % ids_text(ids)


def _usage(content: ResponseContent) -> Json:
    prompt, completion = len(content.request.prompt_ids), len(content.generation.completion_ids)
    usage: Json = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    return usage | {"prompt_tokens_details": None}


def _tool_calls(generation: Generation) -> list[Json]:
    calls = generation.message.get("tool_calls", [])
    return [{"id": f"call_{generation.id}_{index}", **call} for index, call in enumerate(calls)]


def _routed_experts(content: ResponseContent, default: ExpertForm) -> list[Part]:
    if content.experts is None or not content.request.routed_experts:
        return []
    form = content.experts.shape.form or default
    return [b',"routed_experts":', *content.experts.encoded(form, content.sequence, content.request.experts_from)]


Token = Callable[[int, str, float], Any]


def _logprobs(content: ResponseContent, token: Token) -> bytes:
    return b'{"content":[%b]}' % _tokens(content.generation, token) if content.request.logprobs else b"null"


def _tokens(generation: Generation, token: Token) -> bytes:
    texts = _token_texts(token)
    indices = generation.completion_ids * len(LOGPROB_LEVELS) + generation.levels
    return b",".join([texts[index] for index in indices.tolist()])


@cache
def _token_texts(token: Token) -> list[bytes]:
    """The JSON of every token with every logprob."""
    names = [SPECIAL.get(id) or bytes([id]).decode("utf-8", "replace") for id in range(VOCABULARY)]
    return [orjson.dumps(token(id, name, logprob)) for id, name in enumerate(names) for logprob in LOGPROB_LEVELS]


def _vllm_token(_: int, name: str, logprob: float) -> Json:
    return {"token": name, "logprob": logprob, "bytes": list(name.encode()), "top_logprobs": []}


def _sglang_token(_: int, name: str, logprob: float) -> Json:
    return {"token": name, "bytes": list(name.encode()), "logprob": logprob, "top_logprobs": []}


def _sglang_pair(id: int, _: str, logprob: float) -> list[Any]:
    return [logprob, id, None]


def _named_token(id: int, _: str, logprob: float) -> Json:
    name = f"token_id:{id}"
    return {"token": name, "logprob": logprob, "bytes": list(name.encode()), "top_logprobs": []}

"""Response bodies as vLLM 0.32 and SGLang 0.5.19 write them: same fields, same order, compact.

A body is a list of parts, mostly views of bytes that exist already; nothing large goes through a JSON encoder.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import orjson

from headpond.demo.scripted_engine.completion_requests import CompletionRequest
from headpond.demo.scripted_engine.expert_table import Part
from headpond.demo.scripted_engine.generation import LOGPROB_LEVELS, Generation, Sampled
from headpond.demo.scripted_engine.options import ExpertForm
from headpond.renderers.bytes_chatml import MESSAGE_END, MESSAGE_START, VOCABULARY
from headpond.turn import Ids, ids_text

# Seconds since 1970, constant: the same request gets the same bytes.
CREATED = 1762300000
SPECIAL = {MESSAGE_START: "<|im_start|>", MESSAGE_END: "<|im_end|>"}
# vLLM sends it in place of a logprob that it does not have.
NO_LOGPROB = -9999.0
Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ResponseContent:
    """The content of a body."""

    request: CompletionRequest
    sampled: Sampled
    model: str

    @property
    def generation(self) -> Generation:
        return self.sampled.generation

    @property
    def name(self) -> str:
        return self.request.request_id or self.generation.id

    @property
    def sequence(self) -> Ids:
        return np.concatenate([self.request.prompt_ids, self.generation.completion_ids])


def vllm_chat_body(content: ResponseContent) -> list[Part]:
    generation, request = content.generation, content.request
    calls = _tool_calls(generation)
    message: Json = {
        "role": "assistant",
        "content": generation.message["content"],
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        **({"tool_calls": calls} if calls else {}),
        "reasoning": generation.thoughts,
    }
    ids = _ids(generation.completion_ids) if request.token_ids else b"null"
    prompt_ids = _ids(request.prompt_ids) if request.token_ids else b"null"
    return [
        b'{"id":%b,"object":"chat.completion","created":%d,"model":%b,"choices":[{"index":0,"message":%b'
        % (orjson.dumps(f"chatcmpl-{content.name}"), CREATED, orjson.dumps(content.model), orjson.dumps(message)),
        b',"logprobs":%b' % _logprobs(content, _vllm_token),
        b',"finish_reason":"%b","stop_reason":null,"token_ids":%b' % (generation.finish_reason.encode(), ids),
        *(_routed_experts(content, "npy") or [b',"routed_experts":null']),
        b'}],"service_tier":null,"system_fingerprint":null,"usage":%b' % orjson.dumps(_usage(content)),
        b',"prompt_logprobs":null,"prompt_token_ids":%b,"prompt_text":null' % prompt_ids,
        b',"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}',
    ]


def sglang_chat_body(content: ResponseContent) -> list[Part]:
    generation, request = content.generation, content.request
    text = generation.message["content"]
    message: Json = {"role": "assistant", "content": text if generation.reasoning is None else ""}
    message |= {"reasoning_content": generation.thoughts, "tool_calls": _tool_calls(generation) or None}
    matched = b"null" if generation.ended_early else b"%d" % MESSAGE_END
    experts = _routed_experts(content, "bare") if request.meta_info else []
    return [
        b'{"id":%b,"object":"chat.completion","created":%d,"model":%b,"choices":[{"index":0,"message":%b'
        % (orjson.dumps(content.name), CREATED, orjson.dumps(content.model), orjson.dumps(message)),
        b',"logprobs":%b' % _logprobs(content, _sglang_token),
        b',"finish_reason":"%b","matched_stop":%b' % (generation.finish_reason.encode(), matched),
        b',"prompt_token_ids":%b' % _ids(request.prompt_ids) if request.token_ids else b"",
        *(_sglang_meta_info(content, experts) if request.meta_info else []),
        b'}],"usage":%b' % orjson.dumps(_usage(content) | {"reasoning_tokens": 0}),
        b',"metadata":{"weight_version":%b}' % _label(content),
        b"}",
    ]


def _sglang_meta_info(content: ResponseContent, experts: list[Part]) -> list[Part]:
    generation, request = content.generation, content.request
    return [
        b',"meta_info":{"id":%b,"finish_reason":%b,"prompt_tokens":%d,"weight_version":%b'
        % (orjson.dumps(content.name), _sglang_finish_reason(generation), len(request.prompt_ids), _label(content)),
        b',"weight_versions":%b' % _weight_versions(content),
        b',"total_retractions":0',
        b',"output_token_logprobs":[%b]' % _tokens(generation, _sglang_pair) if request.logprobs else b"",
        b',"completion_tokens":%d,"cached_tokens":0' % len(generation.completion_ids),
        *experts,
        b',"e2e_latency":%b}' % orjson.dumps(generation.latency_s),
    ]


def _sglang_finish_reason(generation: Generation) -> bytes:
    match generation.finish_reason:
        case "length":
            return b'{"type":"length","length":%d}' % len(generation.completion_ids)
        case "abort":
            return b'{"type":"abort","message":"Aborted"}'
        case _:
            return b'{"type":"stop","matched":%d}' % MESSAGE_END


def generate_body(content: ResponseContent) -> list[Part]:
    """Write the choices last, and a choice's logprobs last of all, like vLLM 0.32."""
    generation = content.generation
    name = content.name
    experts = _routed_experts(content, "npy") or [b',"routed_experts":null']
    reason = generation.finish_reason if generation.ended_early else "stop"
    finished = b',"finish_reason":"%b"' % reason.encode()
    ids = b',"token_ids":%b' % _ids(generation.completion_ids)
    return [
        b'{"request_id":%b,"model":%b,"created":%d,"usage":%b'
        % (
            orjson.dumps(f"generate-tokens-{name}"),
            orjson.dumps(content.model),
            CREATED,
            orjson.dumps(_usage(content)),
        ),
        b',"prompt_logprobs":null,"prompt_token_id_logprobs":null,"prompt_token_ids":null,"mm_placeholders":null',
        b',"metrics":null,"kv_transfer_params":null,"ec_transfer_params":null,"output_mode":"tokens"',
        b',"choices":[{"index":0%b,"stop_reason":null%b' % (finished, ids),
        *experts,
        b',"sampling_mask":%b' % orjson.dumps(generation.sampling_mask, option=orjson.OPT_SERIALIZE_NUMPY),
        b',"weight_versions":%b' % _weight_versions(content),
        b',"logprobs":%b}]}' % _logprobs(content, _numbered_token),
    ]


def _label(content: ResponseContent) -> bytes:
    return orjson.dumps(content.sampled.spans[-1].state.label)


def _weight_versions(content: ResponseContent) -> bytes:
    return orjson.dumps(
        [{"version": span.state.label, "start": span.start, "end": span.end} for span in content.sampled.spans]
    )


def _ids(ids: Ids) -> bytes:
    return b"[%b]" % ids_text(ids)


def _usage(content: ResponseContent) -> Json:
    prompt, completion = len(content.request.prompt_ids), len(content.generation.completion_ids)
    usage: Json = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    return usage | {"prompt_tokens_details": None, "completion_tokens_details": None}


def _tool_calls(generation: Generation) -> list[Json]:
    calls = generation.message.get("tool_calls", [])
    return [{"id": f"call_{generation.id}_{index}", **call} for index, call in enumerate(calls)]


def _routed_experts(content: ResponseContent, default: ExpertForm) -> list[Part]:
    if content.sampled.experts is None or not content.request.routed_experts:
        return []
    form = content.sampled.experts.form or default
    return [
        b',"routed_experts":',
        *content.sampled.experts.encoded(form, content.sequence, content.request.experts_from),
    ]


Token = Callable[[int, str, float], Any]


def _logprobs(content: ResponseContent, token: Token) -> bytes:
    return b'{"content":[%b]}' % _tokens(content.generation, token) if content.request.logprobs else b"null"


def _tokens(generation: Generation, token: Token) -> bytes:
    if generation.logprobs is not None:
        sampled = zip(generation.completion_ids.tolist(), generation.logprobs.tolist(), strict=True)
        entries = [orjson.dumps(token(id, _name(id), logprob)) for id, logprob in sampled]
    else:
        texts = _token_texts(token)
        indices = generation.completion_ids * len(LOGPROB_LEVELS) + generation.levels
        entries = [texts[index] for index in indices.tolist()]
    if unknown := generation.unknown_logprobs:
        ids = generation.completion_ids[-unknown:].tolist()
        entries[-unknown:] = [orjson.dumps(token(id, _name(id), NO_LOGPROB)) for id in ids]
    return b",".join(entries)


@cache
def _token_texts(token: Token) -> list[bytes]:
    """The JSON of every token with every logprob."""
    names = [_name(id) for id in range(VOCABULARY)]
    return [orjson.dumps(token(id, name, logprob)) for id, name in enumerate(names) for logprob in LOGPROB_LEVELS]


def _name(id: int) -> str:
    return SPECIAL.get(id) or bytes([id]).decode("utf-8", "replace")


def _vllm_token(_: int, name: str, logprob: float) -> Json:
    return {"token": name, "logprob": logprob, "bytes": list(name.encode()), "top_logprobs": []}


def _sglang_token(_: int, name: str, logprob: float) -> Json:
    return {"token": name, "bytes": list(name.encode()), "logprob": logprob, "top_logprobs": []}


def _sglang_pair(id: int, _: str, logprob: float) -> list[Any]:
    return [logprob, id, None]


def _numbered_token(id: int, _: str, logprob: float) -> Json:
    candidate: Json = {"token_id": id, "logprob": logprob, "rank": 1}
    if logprob == NO_LOGPROB:
        return {"token_id": id, "logprob": logprob, "rank": None, "top_logprobs": []}
    return {**candidate, "top_logprobs": [candidate]}

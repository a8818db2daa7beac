"""Responses of real servers (vLLM 0.31 and 0.32, SGLang 0.5.19): their fields, in their order."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from support.engine_responses import routed

Json = dict[str, Any]
PROMPT, COMPLETION = [11, 12, 13], [21, 22, 23]
LOGPROBS = [-0.25, -0.5, -1.5]


def vllm_chat(
    message: Json | None = None,
    *,
    prompt: Sequence[int] = PROMPT,
    completion: Sequence[int] = COMPLETION,
    logprobs: Sequence[float] = LOGPROBS,
    finish_reason: str = "stop",
    rows: NDArray[Any] | None = None,
) -> Json:
    """vLLM 0.32, `/v1/chat/completions`."""
    given: Json = {"role": "assistant", "content": "It is 4.", "refusal": None, "annotations": None, "audio": None}
    content = [
        {"token": f"t{token}", "logprob": logprob, "bytes": [116], "top_logprobs": []}
        for token, logprob in zip(completion, logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "message": given | {"function_call": None, "reasoning": None} | (message or {}),
        "logprobs": {"content": content},
        "finish_reason": finish_reason,
        "stop_reason": None,
        "token_ids": list(completion),
        "routed_experts": None if rows is None else routed(rows, "npy"),
    }
    return {
        "id": "chatcmpl-9c1d4b",
        "object": "chat.completion",
        "created": 1762300000,
        "model": "policy",
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": "vllm-0.32.0-2c744646",
        "usage": _usage(prompt, completion),
        "prompt_logprobs": None,
        "prompt_token_ids": list(prompt),
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def vllm_generate(
    *,
    prompt: Sequence[int] = PROMPT,
    completion: Sequence[int] = COMPLETION,
    logprobs: Sequence[float] = LOGPROBS,
    finish_reason: str = "stop",
    rows: NDArray[Any] | None = None,
    version: int = 7,
    sampling_mask: list[list[int]] | None = None,
) -> Json:
    """vLLM 0.32, `/inference/v1/generate`: the choices come last, and a choice's logprobs last of all."""
    pairs = list(zip(completion, logprobs, strict=True))
    content = [
        {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": [{"token_id": token, "logprob": logprob}]}
        for token, logprob in pairs
    ]
    choice = {
        "index": 0,
        "finish_reason": finish_reason,
        "stop_reason": None,
        "token_ids": list(completion),
        "routed_experts": None if rows is None else routed(rows, "npy"),
        "sampling_mask": sampling_mask,
        "weight_versions": [{"version": str(version), "start": 0, "end": len(completion)}] if completion else None,
        "logprobs": {"content": content},
    }
    return {
        "request_id": "generate-tokens-9c1d4b",
        "model": "policy",
        "created": 1762300000,
        "usage": _usage(prompt, completion),
        "prompt_logprobs": None,
        "prompt_token_id_logprobs": None,
        "prompt_token_ids": None,
        "mm_placeholders": None,
        "metrics": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "output_mode": "tokens",
        "choices": [choice],
    }


def vllm_generate_0_31(**changes: Any) -> Json:
    """vLLM 0.31, `/inference/v1/generate`: logprobs name their token in a text."""
    newer = vllm_generate(**changes)
    choice = newer["choices"][0]
    content = [
        {
            "token": f"token_id:{entry['token_id']}",
            "logprob": entry["logprob"],
            "bytes": list(f"token_id:{entry['token_id']}".encode()),
            "top_logprobs": [],
        }
        for entry in choice["logprobs"]["content"]
    ]
    names = ("finish_reason", "token_ids", "routed_experts")
    older = {"index": 0, "logprobs": {"content": content}, **{name: choice[name] for name in names}}
    return {"request_id": newer["request_id"], "choices": [older], "prompt_logprobs": None, "kv_transfer_params": None}


def sglang_chat(
    *,
    prompt: Sequence[int] = PROMPT,
    completion: Sequence[int] = COMPLETION,
    logprobs: Sequence[float] = LOGPROBS,
    finish_reason: str = "stop",
    rows: NDArray[Any] | None = None,
    version: int = 7,
    sampling_mask: list[list[int]] | None = None,
) -> Json:
    """SGLang 0.5.19, `/v1/chat/completions`."""
    experts = {} if rows is None else {"routed_experts": routed(rows, "bare")}
    masks: Json = {}
    if sampling_mask is not None:
        masks = {"output_token_sampling_mask": sampling_mask, "output_token_sampling_logprobs": list(logprobs)}
    spans = [{"version": str(version), "start": 0, "end": len(completion)}]
    meta_info = {
        "id": "9c1d4b",
        "finish_reason": {"type": finish_reason},
        "prompt_tokens": len(prompt),
        "weight_version": str(version),
        "weight_versions": spans,
        "total_retractions": 0,
        "output_token_logprobs": [[logprob, token, None] for token, logprob in zip(completion, logprobs, strict=True)],
        **masks,
        "completion_tokens": len(completion),
        "cached_tokens": 0,
        **experts,
        "e2e_latency": 0.25,
    }
    message = {"role": "assistant", "content": "It is 4.", "reasoning_content": None, "tool_calls": None}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": finish_reason,
        "matched_stop": None,
        "prompt_token_ids": list(prompt),
        "meta_info": meta_info,
    }
    return {
        "id": "9c1d4b",
        "object": "chat.completion",
        "created": 1762300000,
        "model": "policy",
        "choices": [choice],
        "usage": _usage(prompt, completion) | {"reasoning_tokens": 0},
        "metadata": {"weight_version": str(version)},
    }


def _usage(prompt: Sequence[int], completion: Sequence[int]) -> Json:
    counts = {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + len(completion)}
    details = {"prompt_tokens_details": None, "completion_tokens_details": None}
    return {**counts, "completion_tokens": len(completion), **details}

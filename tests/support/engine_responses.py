"""Responses of engines for tests: three dialects, four forms of routed experts, as dictionaries that tests change."""

import base64
import io
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headpond.config.engine import Engine
from headpond.engines.dialects import load_dialect
from headpond.engines.responses.response import RequestInfo

DIALECTS = ("vllm", "sglang", "generate")
FORMS = ("object", "npy", "bare")


@dataclass(frozen=True, kw_only=True)
class ResponseSpec:
    """The content of a response, independent of its dialect."""

    prompt: list[int]
    completion: list[int]
    logprobs: list[float] = field(default_factory=list[float])
    rows: NDArray[Any] | None = None
    """Routed experts `[rows, layers, topk]`, from `start` on."""
    start: int = 0
    dialect: str = "vllm"
    form: str = "object"
    versions: list[dict[str, Any]] | None = None
    """Of the weights, as SGLang and `generate` state them."""
    named_by_id: bool = False
    """Whether `generate` names the tokens of its logprobs by number, as vLLM does from 0.32 on."""
    content: str = 'Grüße, "Welt" \\ {"routed_experts":"x"}\n'

    def as_dict(self) -> dict[str, Any]:
        return {"vllm": vllm_response, "sglang": sglang_response, "generate": generate_response}[self.dialect](self)

    def body(self) -> bytes:
        return compact(self.as_dict())


def request_info(dialect: str = "vllm", **fields: Any) -> RequestInfo:
    return RequestInfo(dialect=load_dialect(dialect)(Engine()), **fields)


def compact(response: Any) -> bytes:
    return json.dumps(response, separators=(",", ":"), ensure_ascii=False).encode()


def vllm_response(spec: ResponseSpec) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": spec.content, "tool_calls": []},
        "logprobs": {"content": _content(spec, [f"t{token}" for token in spec.completion])},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": spec.completion,
        **_routed(spec),
    }
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1762300000,
        "model": "policy",
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(spec.prompt),
            "completion_tokens": len(spec.completion),
            "total_tokens": len(spec.prompt) + len(spec.completion),
        },
        "prompt_logprobs": None,
        "prompt_token_ids": spec.prompt,
        "kv_transfer_params": None,
    }


def sglang_response(spec: ResponseSpec) -> dict[str, Any]:
    """SGLang does not repeat the prompt's ids."""
    tokens = [[logprob, token, None] for logprob, token in zip(_logprobs(spec), spec.completion, strict=True)]
    meta_info = {
        "id": "1",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": len(spec.prompt),
        "weight_version": "7",
        **({"weight_versions": spec.versions} if spec.versions is not None else {}),
        "output_token_logprobs": tokens,
        "completion_tokens": len(spec.completion),
        **_routed(spec),
    }
    message = {"role": "assistant", "content": spec.content, "reasoning_content": None, "tool_calls": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "meta_info": meta_info}
    return {"id": "1", "object": "chat.completion", "choices": [choice], "usage": {"prompt_tokens": len(spec.prompt)}}


def generate_response(spec: ResponseSpec) -> dict[str, Any]:
    content = _content(spec, [f"token_id:{token}" for token in spec.completion])
    if spec.named_by_id:
        numbered = zip(spec.completion, _logprobs(spec), strict=True)
        content = [{"token_id": token, "logprob": value, "rank": 1, "top_logprobs": []} for token, value in numbered]
    choice = {
        "index": 0,
        "logprobs": {"content": content},
        "finish_reason": "length",
        "token_ids": spec.completion,
        "weight_versions": spec.versions,
        **_routed(spec),
    }
    return {"request_id": "1", "choices": [choice], "prompt_logprobs": None, "kv_transfer_params": None}


def _logprobs(spec: ResponseSpec) -> list[float]:
    return spec.logprobs or [-0.25 * (token % 7) for token in spec.completion]


def _content(spec: ResponseSpec, names: list[str]) -> list[dict[str, Any]]:
    return [
        {"token": name, "logprob": logprob, "bytes": list(name.encode()), "top_logprobs": []}
        for name, logprob in zip(names, _logprobs(spec), strict=True)
    ]


def _routed(spec: ResponseSpec) -> dict[str, Any]:
    return {} if spec.rows is None else {"routed_experts": routed(spec.rows, spec.form, spec.start)}


def routed(rows: NDArray[Any], form: str, start: int = 0) -> Any:
    match form:
        case "object":
            shown = {"data": text(rows.tobytes()), "shape": list(rows.shape)}
            return (
                shown
                | ({"start": start} if start else {})
                | ({} if rows.dtype == np.uint8 else {"dtype": rows.dtype.name})
            )
        case "npy":
            file = io.BytesIO()
            np.save(file, rows)
            return text(file.getvalue())
        case "bare":
            return text(rows.astype(np.int32).tobytes())
        case _:
            return rows.tolist()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()

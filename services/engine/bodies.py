"""An answer as vLLM, SGLang or `/inference/v1/generate` print it: their fields, in their order, without spaces.

A body is a list of parts, most of it views of bytes that were there before; nothing large goes through a JSON encoder.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import orjson

from penstock.renderers.bytes_chatml import MESSAGE_END, MESSAGE_START, VOCABULARY
from penstock.turn import Ids, ids_text
from services.engine.completions import LOGPROB_LEVELS, Answer
from services.engine.requests import Asked
from services.engine.route_table import Part, RouteTable
from services.engine.settings import Form

CREATED = 1762300000
"""Seconds since 1970, always the same: the same request gets the same bytes."""
SPECIAL = {MESSAGE_START: "<|im_start|>", MESSAGE_END: "<|im_end|>"}
Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Printed:
    """All that a body is made of."""

    asked: Asked
    answer: Answer
    model: str
    version: int
    routes: RouteTable | None

    @property
    def sequence(self) -> Ids:
        return np.concatenate([self.asked.prompt_ids, self.answer.completion_ids])


def vllm_chat(said: Printed) -> list[Part]:
    answer, asked = said.answer, said.asked
    message: Json = {"role": "assistant", "content": answer.message["content"], "refusal": None, "annotations": None}
    message |= {"audio": None, "function_call": None, "tool_calls": _tool_calls(answer), "reasoning": None}
    ids = _ids(answer.completion_ids) if asked.token_ids else b"null"
    prompt_ids = _ids(asked.prompt_ids) if asked.token_ids else b"null"
    return [
        b'{"id":"chatcmpl-%b","object":"chat.completion","created":%d,"model":%b,"choices":[{"index":0,"message":%b'
        % (answer.id.encode(), CREATED, orjson.dumps(said.model), orjson.dumps(message)),
        b',"logprobs":%b' % _logprobs(said, _vllm_token),
        b',"finish_reason":"%b","stop_reason":null,"token_ids":%b' % (answer.finish_reason.encode(), ids),
        *(_routed(said, Form.NPY) or [b',"routed_experts":null']),
        b'}],"service_tier":null,"system_fingerprint":null,"usage":%b' % orjson.dumps(_usage(said)),
        b',"prompt_logprobs":null,"prompt_token_ids":%b,"kv_transfer_params":null}' % prompt_ids,
    ]


def sglang_chat(said: Printed) -> list[Part]:
    answer, asked = said.answer, said.asked
    message: Json = {"role": "assistant", "content": answer.message["content"], "reasoning_content": None}
    message |= {"tool_calls": _tool_calls(answer) or None}
    matched = b"null" if answer.cut else b"%d" % MESSAGE_END
    return [
        b'{"id":"%b","object":"chat.completion","created":%d,"model":%b,"choices":[{"index":0,"message":%b'
        % (answer.id.encode(), CREATED, orjson.dumps(said.model), orjson.dumps(message)),
        b',"logprobs":%b' % _logprobs(said, _sglang_token),
        b',"finish_reason":"%b","matched_stop":%b' % (answer.finish_reason.encode(), matched),
        b',"prompt_token_ids":%b' % _ids(asked.prompt_ids) if asked.token_ids else b"",
        *(_sglang_meta_info(said) if asked.meta_info else []),
        b'}],"usage":%b' % orjson.dumps(_usage(said) | {"reasoning_tokens": 0}),
        b',"metadata":{"weight_version":"%d"}}' % said.version,
    ]


def _sglang_meta_info(said: Printed) -> list[Part]:
    answer, asked = said.answer, said.asked
    tokens = len(answer.completion_ids)
    ended: Json = {"type": "length", "length": tokens} if answer.cut else {"type": "stop", "matched": MESSAGE_END}
    return [
        b',"meta_info":{"id":"%b","finish_reason":%b,"prompt_tokens":%d,"weight_version":"%d","total_retractions":0'
        % (answer.id.encode(), orjson.dumps(ended), len(asked.prompt_ids), said.version),
        b',"output_token_logprobs":[%b]' % _tokens(answer, _sglang_pair) if asked.logprobs else b"",
        b',"completion_tokens":%d,"cached_tokens":0' % tokens,
        *_routed(said, Form.BARE),
        b',"e2e_latency":%b}' % orjson.dumps(answer.latency_s),
    ]


def generate(said: Printed) -> list[Part]:
    answer = said.answer
    return [
        b'{"request_id":%b,"choices":[{"index":0' % orjson.dumps(said.asked.request_id or answer.id),
        b',"logprobs":%b' % _logprobs(said, _named_token),
        b',"finish_reason":"%b"' % (b"length" if answer.cut else b"stop"),
        b',"token_ids":%b' % _ids(answer.completion_ids),
        *(_routed(said, Form.OBJECT) or [b',"routed_experts":null']),
        b'}],"prompt_logprobs":null,"kv_transfer_params":null,"usage":%b}' % orjson.dumps(_usage(said)),
    ]


def _ids(ids: Ids) -> bytes:
    return b"[%b]" % ids_text(ids)


def _usage(said: Printed) -> Json:
    prompt, completion = len(said.asked.prompt_ids), len(said.answer.completion_ids)
    usage: Json = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    return usage | {"prompt_tokens_details": None}


def _tool_calls(answer: Answer) -> list[Json]:
    calls = answer.message.get("tool_calls", [])
    return [{"id": f"call_{answer.id}_{place}", **call} for place, call in enumerate(calls)]


def _routed(said: Printed, usual: Form) -> list[Part]:
    if said.routes is None or not said.asked.routes:
        return []
    form = said.routes.shape.form or usual
    return [b',"routed_experts":', *said.routes.written(form, said.sequence, said.asked.routes_from)]


Token = Callable[[int, str, float], Any]


def _logprobs(said: Printed, token: Token) -> bytes:
    return b'{"content":[%b]}' % _tokens(said.answer, token) if said.asked.logprobs else b"null"


def _tokens(answer: Answer, token: Token) -> bytes:
    texts = _token_texts(token)
    return b",".join([texts[place] for place in (answer.completion_ids * len(LOGPROB_LEVELS) + answer.levels).tolist()])


@cache
def _token_texts(token: Token) -> list[bytes]:
    """Every token with every logprob, as it is printed."""
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

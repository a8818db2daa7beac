"""Response bodies as vLLM serializes a chat completion: same fields, same order, no spaces."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import orjson
import pybase64
from numpy.typing import NDArray

VOCABULARY = 150_000
PIECES = [
    " the",
    "ing",
    ".",
    "\n\n",
    " function",
    "_id",
    "(",
    "self",
    "),",
    " =",
    " return",
    "    ",
    " value",
    "s",
    " is",
    "1",
    " that",
    "ation",
    " int",
    "error",
    " we",
    " not",
]
"""text of tokens; about four characters each, as in ordinary text and code"""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One agent's conversation: each turn's prompt is everything before it plus new tokens."""

    turns: int
    tokens: int
    """after the last turn; every turn adds the same number"""
    sampled: float
    """share of a turn's new tokens that the policy sampled; the others are tool results and user messages"""
    layers: int = 48
    topk: int = 8
    seed: int = 0

    def ids(self) -> NDArray[np.int32]:
        return np.random.default_rng(self.seed).integers(0, VOCABULARY, self.tokens, dtype=np.int32)

    def logprobs(self) -> NDArray[np.float64]:
        return -np.random.default_rng(self.seed).exponential(0.5, self.tokens)

    def rows(self) -> NDArray[np.uint8]:
        shape = self.tokens, self.layers, self.topk
        return np.random.default_rng(self.seed).integers(1, 128, shape, dtype=np.uint8)

    def spans(self) -> Iterator[tuple[int, int]]:
        """For each turn: tokens of the prompt, tokens of prompt and completion."""
        for turn in range(self.turns):
            before, after = turn * self.tokens // self.turns, (turn + 1) * self.tokens // self.turns
            yield after - round((after - before) * self.sampled), after

    def bodies(self) -> Iterator[bytes]:
        """One at a time: together they can be a gigabyte."""
        ids, logprobs = self.ids(), self.logprobs()
        rows = self.rows()
        for prompt, total in self.spans():
            yield chat_body(ids[:prompt], ids[prompt:total], logprobs[prompt:total], rows[: total - 1])


def chat_body(
    prompt: NDArray[np.int32],
    completion: NDArray[np.int32],
    logprobs: NDArray[np.float64],
    rows: NDArray[np.uint8],
) -> bytes:
    pieces = [PIECES[token % len(PIECES)] for token in completion]
    message = {"role": "assistant", "content": "".join(pieces), "refusal": None, "annotations": None, "audio": None}
    message |= {"function_call": None, "tool_calls": [], "reasoning": None}
    content = [
        {"token": piece, "logprob": float(logprob), "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, logprob in zip(pieces, logprobs, strict=True)
    ]
    choice = {"index": 0, "message": message, "logprobs": {"content": content}, "finish_reason": "stop"}
    choice |= {"stop_reason": None, "token_ids": completion, "routed_experts": {"data": "", "shape": rows.shape}}
    usage = {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + len(completion)}
    usage |= {"completion_tokens": len(completion), "prompt_tokens_details": None}
    response = {"id": "chatcmpl-0f3f2c6e5d7b4a1c9e8d7c6b5a493827", "object": "chat.completion", "created": 1762300000}
    response |= {"model": "policy", "choices": [choice], "service_tier": None, "system_fingerprint": None}
    response |= {"usage": usage, "prompt_logprobs": None, "prompt_token_ids": prompt, "kv_transfer_params": None}
    before, behind = orjson.dumps(response, option=orjson.OPT_SERIALIZE_NUMPY).split(b'"data":"', 1)
    return b"".join([before, b'"data":"', pybase64.b64encode(rows.data), behind])

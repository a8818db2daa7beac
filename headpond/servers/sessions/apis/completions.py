"""OpenAI's Completions, for agents that render their prompts themselves: tokens in, tokens out.

A prompt that begins with the tokens of a recorded turn extends its sample.
"""

from typing import Any, ClassVar

import msgspec
import numpy as np
import orjson

from headpond.engines.dialects.base import TOKEN_IDS
from headpond.errors import BadRequest
from headpond.servers.sessions.apis.base import (
    OF_OPERATORS,
    Api,
    ChatRequest,
    Completion,
    Fields,
    History,
    Recorded,
    refuse,
)
from headpond.turn import Ids

REFUSED = OF_OPERATORS | {
    "suffix": "send the whole prompt",
    "echo": "the prompt is not repeated",
    "best_of": "a request records one completion",
}
# Fields that are read here, and fields of a chat that this API does not have.
READ_HERE = ("prompt", "logprobs", "messages", "tools")


class Completions(Api):
    path: ClassVar[str] = "/v1/completions"

    def chat(self, given: dict[str, Any], history: History | None) -> ChatRequest:
        refuse(given, REFUSED)
        fields = {name: value for name, value in given.items() if name not in (*READ_HERE, *REFUSED)}
        ranks = given.get("logprobs")
        if ranks is not None:
            fields |= {"logprobs": True, "top_logprobs": ranks}
        return ChatRequest(fields=fields | {"return_token_ids": True}, prompt_ids=_prompt_ids(given))

    def response(self, recorded: Recorded) -> bytes:
        return orjson.dumps(_response(recorded))

    def stream(self, recorded: Recorded) -> bytes:
        response = _response(recorded)
        usage = response.pop("usage")
        chunks = [response] + ([response | {"choices": [], "usage": usage}] if recorded.asked.usage else [])
        return b"".join(b"data: %b\n\n" % orjson.dumps(chunk) for chunk in chunks) + b"data: [DONE]\n\n"


def _prompt_ids(given: Fields) -> Ids:
    prompt = given.get("prompt")
    match prompt:
        case [[*ids]]:
            prompt = ids
        case _:
            pass
    try:
        ids = msgspec.convert(prompt, TOKEN_IDS.type)
    except msgspec.ValidationError:
        ids = []
    if not ids:
        raise BadRequest("prompt must be a list of token ids: one prompt, which is not tokenized here")
    return np.array(ids, np.int32)


def _response(recorded: Recorded) -> dict[str, Any]:
    completion = Completion.of(recorded.completion)
    (choice,) = orjson.loads(recorded.completion)["choices"]
    return {
        "id": f"cmpl-{recorded.id}",
        "object": "text_completion",
        "created": completion.created,
        "model": completion.model,
        "choices": [
            {
                "index": 0,
                "text": completion.text,
                "token_ids": choice["token_ids"],
                "logprobs": _logprobs(completion.logprobs),
                "finish_reason": completion.finish_reason,
            }
        ],
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": completion.completion_tokens,
            "total_tokens": completion.prompt_tokens + completion.completion_tokens,
        },
    }


def _logprobs(content: list[dict[str, Any]]) -> dict[str, Any] | None:
    if not content:
        return None
    return {
        "tokens": [entry["token"] for entry in content],
        "token_logprobs": [entry["logprob"] for entry in content],
        "top_logprobs": [
            {each["token"]: each["logprob"] for each in entry.get("top_logprobs") or []} for entry in content
        ],
    }

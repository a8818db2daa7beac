"""Token-in/token-out: vLLM's `/inference/v1/generate`. The response has no message, and names tokens by their id."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from penstock.engines.dialects.base import (
    ABSENT,
    Dialect,
    Prompt,
    ResponseFields,
    TokenLogprob,
    only_choice,
    read_completion,
)
from penstock.engines.dialects.control_calls import ControlCalls, VllmCalls
from penstock.engines.weight_labels import LabelSpan, read_spans
from penstock.errors import Upstream
from penstock.turn import Ids, ids_text


class NamedLogprob(TokenLogprob, gc=False):
    token: str
    """`token_id:<id>`"""


class NamedLogprobs(msgspec.Struct):
    content: list[NamedLogprob]


class Choice(msgspec.Struct):
    logprobs: NamedLogprobs | None = None
    token_ids: msgspec.Raw = ABSENT
    routed_experts: msgspec.Raw = ABSENT
    finish_reason: str | None = None
    weight_versions: list[LabelSpan] | None = None
    """From vLLM 0.32 on."""


class GenerateResponse(msgspec.Struct):
    choices: list[Choice]
    prompt_token_ids: msgspec.Raw = ABSENT


RESPONSE = msgspec.json.Decoder(GenerateResponse)


class Generate(Dialect):
    checks_values: ClassVar[bool] = True
    control: ClassVar[ControlCalls] = VllmCalls()
    endpoint: ClassVar[str] = "/inference/v1/generate"
    takes_messages: ClassVar[bool] = False
    takes_tokens: ClassVar[bool] = True
    prompt_key: ClassVar[bytes] = b'"prompt_token_ids":['
    experts_key: ClassVar[bytes] = b'"routed_experts":'

    def request_fields(self, prompt: Prompt, sampling: Mapping[str, Any]) -> dict[str, Any]:
        routes = {"routed_experts_prompt_start": prompt.routes_from} if self.settings.routed_experts else {}
        return {"token_ids": prompt.ids, "sampling_params": {**sampling, "logprobs": 1, **routes}}

    def read(self, text: bytes) -> ResponseFields:
        response = RESPONSE.decode(text)
        choice = only_choice(response.choices)
        content = choice.logprobs.content if choice.logprobs else None
        ids, logprobs = read_completion(choice.token_ids, content)
        check_names(content or (), ids)
        return ResponseFields(
            prompt_ids=response.prompt_token_ids,
            completion_ids=ids,
            completion_logprobs=logprobs,
            routed_experts=choice.routed_experts,
            finish_reason=choice.finish_reason,
            version_spans=read_spans(choice.weight_versions),
        )


def check_names(content: Sequence[NamedLogprob], ids: Ids) -> None:
    """`Upstream` if the logprobs name other tokens than `ids`."""
    names = b"token_id:" + ids_text(ids).replace(b",", b",token_id:") if len(ids) else b""
    if ",".join([token.token for token in content]).encode() != names:
        raise Upstream("the engine's response has logprobs of other tokens than its token_ids")

"""SGLang's chat API. It takes messages or `input_ids`; the response has tokens, version and routes in `meta_info`."""

from typing import Any, ClassVar

import msgspec
import numpy as np

from penstock.engines.dialects.base import (
    ABSENT,
    ChatDialect,
    Logprob,
    Prompt,
    ResponseFields,
    TokenId,
    only_choice,
    read_message,
)
from penstock.engines.dialects.control_calls import ControlCalls, SglangCalls
from penstock.engines.weight_labels import LabelSpan, Version, read_label, read_spans
from penstock.errors import Upstream
from penstock.turn import Ids, Logprobs


class OutputToken(msgspec.Struct, array_like=True, gc=False):
    """`[logprob, token_id, ...]`"""

    logprob: Logprob
    token_id: TokenId


class MetaInfo(msgspec.Struct):
    output_token_logprobs: list[OutputToken] | None = None
    completion_tokens: int | None = None
    weight_version: str | Version | None = None
    """When the completion ended."""
    weight_versions: list[LabelSpan] | None = None
    """From 0.5.19 on."""
    routed_experts: msgspec.Raw = ABSENT


NO_META_INFO = MetaInfo()


class Choice(msgspec.Struct):
    message: msgspec.Raw = ABSENT
    prompt_token_ids: msgspec.Raw = ABSENT
    finish_reason: str | None = None
    meta_info: MetaInfo | None = None


class ChatResponse(msgspec.Struct):
    choices: list[Choice]


RESPONSE = msgspec.json.Decoder(ChatResponse)


class Sglang(ChatDialect):
    checks_values: ClassVar[bool] = True
    control: ClassVar[ControlCalls] = SglangCalls()
    takes_tokens: ClassVar[bool] = True

    def required_fields(self, prompt: Prompt) -> dict[str, Any]:
        fields: dict[str, Any] = {"logprobs": True, "return_meta_info": True, "return_prompt_token_ids": True}
        if prompt.ids is not None:
            fields["input_ids"] = prompt.ids
        if self.settings.routed_experts:
            fields |= {"return_routed_experts": True, "routed_experts_start_len": prompt.routes_from}
        return fields

    def read(self, text: bytes) -> ResponseFields:
        choice = only_choice(RESPONSE.decode(text).choices)
        meta_info = choice.meta_info or NO_META_INFO
        ids, logprobs = read_output_tokens(meta_info)
        return ResponseFields(
            prompt_ids=choice.prompt_token_ids,
            completion_ids=ids,
            completion_logprobs=logprobs,
            routed_experts=meta_info.routed_experts,
            message=read_message(choice.message),
            finish_reason=choice.finish_reason,
            version=read_label(meta_info.weight_version),
            version_spans=read_spans(meta_info.weight_versions),
        )


def read_output_tokens(meta_info: MetaInfo) -> tuple[Ids, Logprobs]:
    tokens = meta_info.output_token_logprobs
    if tokens is None:
        raise Upstream("the engine's response has no meta_info.output_token_logprobs; is engine.dialect right?")
    if meta_info.completion_tokens != len(tokens):
        raise Upstream(
            f"meta_info has {len(tokens)} output_token_logprobs but completion_tokens {meta_info.completion_tokens}"
        )
    ids = np.array([token.token_id for token in tokens], np.int32)
    return ids, np.array([token.logprob for token in tokens], np.float32)

"""SGLang's chat API. It takes messages or `input_ids`; the response has tokens, version and routes in `meta_info`."""

from typing import Any, ClassVar

import msgspec
import numpy as np

from headpond.engines.dialects.base import (
    ABORT,
    ABSENT,
    NO_IDS,
    NO_LOGPROBS,
    ChatDialect,
    Logprob,
    Prompt,
    ResponseFields,
    TokenId,
    only_choice,
    read_message,
)
from headpond.engines.weights import ControlCalls, LabelSpan, SglangCalls, Version, read_label, read_spans
from headpond.errors import Upstream
from headpond.turn import Ids, Logprobs


class OutputToken(msgspec.Struct, array_like=True, gc=False):
    """`[logprob, token_id, ...]`"""

    logprob: Logprob
    token_id: TokenId


class FinishReason(msgspec.Struct):
    type: str | None = None


class MetaInfo(msgspec.Struct):
    finish_reason: FinishReason | None = None
    output_token_logprobs: list[OutputToken] | None = None
    completion_tokens: int | None = None
    weight_version: str | Version | None = None  # Version of the weights when the completion ended.
    weight_versions: list[LabelSpan] | None = None  # Sent by SGLang 0.5.19 and later.
    routed_experts: msgspec.Raw = ABSENT
    output_token_sampling_mask: msgspec.Raw = ABSENT


NO_META_INFO = MetaInfo()


class Choice(msgspec.Struct):
    message: msgspec.Raw = ABSENT
    prompt_token_ids: msgspec.Raw = ABSENT
    finish_reason: str | None = None
    meta_info: MetaInfo | None = None


class Extension(msgspec.Struct):
    routed_experts: msgspec.Raw = ABSENT


class ChatResponse(msgspec.Struct):
    choices: list[Choice]
    # Sent by SGLang up to 0.5.18, which repeats the routed experts of `meta_info` here.
    sglext: Extension | None = None


TOO_OLD = "the engine sends routed experts twice, as SGLang to 0.5.18 did; upgrade it to 0.5.19 or newer"
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
        if self.settings.sampling_masks:
            fields["return_sampling_mask"] = True
        return fields

    def named(self, body: bytes, name: str) -> bytes:
        """The body with the name as its last field: SGLang takes the last of two fields with one
        name."""
        return body[:-1] + b',"rid":"%b"}' % name.encode()

    def read(self, text: bytes) -> ResponseFields:
        response = RESPONSE.decode(text)
        choice = only_choice(response.choices)
        if response.sglext and response.sglext.routed_experts != ABSENT:
            raise Upstream(TOO_OLD)
        meta_info = choice.meta_info or NO_META_INFO
        finish_type = meta_info.finish_reason.type if meta_info.finish_reason else None
        aborted = ABORT in (choice.finish_reason, finish_type)
        ids, logprobs = read_output_tokens(meta_info, aborted=aborted)
        return ResponseFields(
            prompt_ids=choice.prompt_token_ids,
            completion_ids=ids,
            completion_logprobs=logprobs,
            routed_experts=meta_info.routed_experts,
            sampling_mask=meta_info.output_token_sampling_mask,
            message=read_message(choice.message),
            finish_reason=ABORT if aborted else choice.finish_reason,
            final=not aborted,
            version=read_label(meta_info.weight_version),
            version_spans=read_spans(meta_info.weight_versions),
        )


def read_output_tokens(meta_info: MetaInfo, *, aborted: bool = False) -> tuple[Ids, Logprobs]:
    tokens = meta_info.output_token_logprobs
    if tokens is None and aborted:
        return NO_IDS, NO_LOGPROBS
    if tokens is None:
        raise Upstream(
            "the engine's response has no meta_info.output_token_logprobs; is engine.dialect right? SGLang must be "
            "0.5.19 or newer"
        )
    if meta_info.completion_tokens != len(tokens):
        raise Upstream(
            f"meta_info has {len(tokens)} output_token_logprobs but completion_tokens {meta_info.completion_tokens}"
        )
    ids = np.array([token.token_id for token in tokens], np.int32)
    return ids, np.array([token.logprob for token in tokens], np.float32)

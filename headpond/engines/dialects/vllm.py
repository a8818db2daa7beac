"""vLLM's chat API. The response has `token_ids`, `logprobs` and `routed_experts` on the choice."""

from typing import Any, ClassVar

import msgspec

from headpond.engines.dialects.base import (
    ABORT,
    ABSENT,
    ChatDialect,
    Prompt,
    ResponseFields,
    TokenLogprobs,
    only_choice,
    read_completion,
    read_message,
)
from headpond.engines.weights import ControlCalls, VllmCalls
from headpond.errors import Upstream


class Choice(msgspec.Struct):
    message: msgspec.Raw = ABSENT
    logprobs: TokenLogprobs | None = None
    token_ids: msgspec.Raw = ABSENT
    routed_experts: msgspec.Raw = ABSENT
    finish_reason: str | None = None


class ChatResponse(msgspec.Struct):
    choices: list[Choice]
    prompt_token_ids: msgspec.Raw = ABSENT
    # Sent by vLLM 0.21 only: it puts the prompt's rows here and those of the completion on
    # the choice.
    prompt_routed_experts: msgspec.Raw = ABSENT


TOO_OLD = "the engine sends routed experts as vLLM 0.21 did; upgrade it to 0.22.0 or newer"
RESPONSE = msgspec.json.Decoder(ChatResponse)


class Vllm(ChatDialect):
    checks_values: ClassVar[bool] = True
    control: ClassVar[ControlCalls] = VllmCalls()

    def required_fields(self, prompt: Prompt) -> dict[str, Any]:
        """Fields that every request needs. Routed experts have none:
        `--enable-return-routed-experts` makes vLLM send them.

        With a reasoning parser and `include_reasoning: false`, vLLM would leave out ids and
        logprobs with the reasoning.
        """
        return {"logprobs": True, "return_token_ids": True, "include_reasoning": True}

    def read(self, text: bytes) -> ResponseFields:
        response = RESPONSE.decode(text)
        choice = only_choice(response.choices)
        if response.prompt_routed_experts != ABSENT:
            raise Upstream(TOO_OLD)
        content = choice.logprobs.content if choice.logprobs else None
        ids, logprobs = read_completion(choice.token_ids, content, choice.finish_reason)
        return ResponseFields(
            prompt_ids=response.prompt_token_ids,
            completion_ids=ids,
            completion_logprobs=logprobs,
            routed_experts=choice.routed_experts,
            message=read_message(choice.message),
            finish_reason=choice.finish_reason,
            final=choice.finish_reason != ABORT,
        )

"""vLLM's chat API. The response has `token_ids`, `logprobs` and `routed_experts` on the choice."""

from typing import Any, ClassVar

import msgspec

from penstock.engines.dialects.base import (
    ABSENT,
    ChatDialect,
    Prompt,
    ResponseFields,
    TokenLogprobs,
    only_choice,
    read_completion,
    read_message,
)
from penstock.engines.dialects.control_calls import ControlCalls, VllmCalls


class Choice(msgspec.Struct):
    message: msgspec.Raw = ABSENT
    logprobs: TokenLogprobs | None = None
    token_ids: msgspec.Raw = ABSENT
    routed_experts: msgspec.Raw = ABSENT
    finish_reason: str | None = None


class ChatResponse(msgspec.Struct):
    choices: list[Choice]
    prompt_token_ids: msgspec.Raw = ABSENT


RESPONSE = msgspec.json.Decoder(ChatResponse)


class Vllm(ChatDialect):
    checks_values: ClassVar[bool] = True
    control: ClassVar[ControlCalls] = VllmCalls()

    def required_fields(self, prompt: Prompt) -> dict[str, Any]:
        """Routed experts have no field: vLLM sends them if started with `--enable-return-routed-experts`."""
        return {"logprobs": True, "return_token_ids": True}

    def read(self, text: bytes) -> ResponseFields:
        response = RESPONSE.decode(text)
        choice = only_choice(response.choices)
        ids, logprobs = read_completion(choice.token_ids, choice.logprobs.content if choice.logprobs else None)
        return ResponseFields(
            prompt_ids=response.prompt_token_ids,
            completion_ids=ids,
            completion_logprobs=logprobs,
            routed_experts=choice.routed_experts,
            message=read_message(choice.message),
            finish_reason=choice.finish_reason,
        )

"""Token-in/token-out: vLLM's `/inference/v1/generate`. The response has no message, and names
tokens by their id.

Each logprob names its token. vLLM 0.32 and later use `token_id`; earlier versions use `token`, the
text `token_id:<id>`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from headpond.engines.dialects.base import (
    ABORT,
    ABSENT,
    MAX_TOKEN_ID,
    Dialect,
    Prompt,
    ResponseFields,
    TokenChoice,
    TokenId,
    TokenLogprob,
    only_choice,
    read_completion,
)
from headpond.engines.weights import ControlCalls, LabelSpan, VllmCalls, read_spans
from headpond.errors import Upstream
from headpond.turn import Body, Ids, ids_text

MAX_RANKS = 20  # Most likely tokens per place. OpenAI's API has the same limit.


class Candidate(TokenLogprob, gc=False):
    token_id: TokenId | None = None
    token: str | None = None

    @property
    def id(self) -> int:
        """The id of the token. `Upstream` if it names none."""
        if self.token_id is not None:
            return self.token_id
        digits = (self.token or "").removeprefix("token_id:")
        if not re.fullmatch("[0-9]{1,10}", digits) or int(digits) > MAX_TOKEN_ID:
            raise Upstream(f"the engine's response has a logprob of {self.token!r}, which is no token id")
        return int(digits)


class RankedLogprob(Candidate):
    top_logprobs: list[Candidate] = msgspec.field(default_factory=list[Candidate])


class NamedLogprobs(msgspec.Struct):
    content: list[Candidate]


class Choice(msgspec.Struct):
    logprobs: NamedLogprobs | None = None
    token_ids: msgspec.Raw = ABSENT
    routed_experts: msgspec.Raw = ABSENT
    sampling_mask: msgspec.Raw = ABSENT
    finish_reason: str | None = None
    weight_versions: list[LabelSpan] | None = None  # Sent by vLLM 0.32 and later.


class GenerateResponse(msgspec.Struct):
    choices: list[Choice]
    prompt_token_ids: msgspec.Raw = ABSENT


class RankedLogprobs(msgspec.Struct):
    content: list[RankedLogprob]


class RankedChoice(msgspec.Struct):
    logprobs: RankedLogprobs | None = None


class RankedResponse(msgspec.Struct):
    choices: list[RankedChoice]


RESPONSE = msgspec.json.Decoder(GenerateResponse)
RANKED = msgspec.json.Decoder(RankedResponse)
OF_CHATS = frozenset(
    {"tool_choice", "parallel_tool_calls", "response_format", "user", "metadata", "store", "reasoning_effort"}
    | {"top_logprobs", "chat_template_kwargs", "chat_template", "functions", "function_call", "service_tier"}
    | {"include_reasoning", "return_token_ids", "add_generation_prompt", "continue_final_message", "modalities"}
    | {"prediction", "verbosity", "safety_identifier", "prompt_cache_key", "echo", "add_special_tokens"}
    | {"prompt_logprobs"}
)  # Fields of a chat that are not sampling parameters.


class Generate(Dialect):
    checks_values: ClassVar[bool] = True
    control: ClassVar[ControlCalls] = VllmCalls()
    endpoint: ClassVar[str] = "/inference/v1/generate"
    absent_hint: ClassVar[str] = "vLLM has this endpoint with --enable-scale-out"
    takes_messages: ClassVar[bool] = False
    takes_tokens: ClassVar[bool] = True
    prompt_key: ClassVar[bytes] = b'"prompt_token_ids":['
    experts_key: ClassVar[bytes] = b'"routed_experts":'

    def request_fields(self, prompt: Prompt, sampling: Mapping[str, Any]) -> dict[str, Any]:
        routes = {"routed_experts_prompt_start": prompt.routes_from} if self.settings.routed_experts else {}
        ranks = sampling.get("top_logprobs")
        logprobs = max(1, min(ranks, MAX_RANKS)) if isinstance(ranks, int) else 1
        structure = structured_outputs(sampling.get("response_format"))
        sampling = {name: value for name, value in sampling.items() if value is not None and name not in OF_CHATS}
        if (limit := sampling.pop("max_completion_tokens", None)) is not None:  # OpenAI's name, which vLLM ignores here
            sampling["max_tokens"] = limit
        parameters = {**sampling, "logprobs": logprobs, **structure, **routes}
        return {"token_ids": prompt.ids, "sampling_params": parameters}

    def logprobs(self, body: Body) -> Sequence[TokenChoice]:
        try:
            (choice,) = RANKED.decode(body).choices
        except msgspec.ValidationError as error:  # `read` does not look at the most likely tokens
            raise Upstream(f"the engine's response has malformed top_logprobs: {error}") from error
        return [
            TokenChoice(
                id=token.id,
                logprob=token.logprob,
                top=[(candidate.id, candidate.logprob) for candidate in token.top_logprobs],
            )
            for token in (choice.logprobs.content if choice.logprobs else ())
        ]

    def read(self, text: bytes) -> ResponseFields:
        response = RESPONSE.decode(text)
        choice = only_choice(response.choices)
        content = choice.logprobs.content if choice.logprobs else None
        ids, logprobs = read_completion(choice.token_ids, content, choice.finish_reason)
        check_names(content or (), ids)
        return ResponseFields(
            prompt_ids=response.prompt_token_ids,
            completion_ids=ids,
            completion_logprobs=logprobs,
            routed_experts=choice.routed_experts,
            sampling_mask=choice.sampling_mask,
            finish_reason=choice.finish_reason,
            version_spans=read_spans(choice.weight_versions),
            final=choice.finish_reason != ABORT,
        )


def structured_outputs(response_format: object) -> dict[str, Any]:
    """OpenAI's `response_format` as vLLM's sampling parameter."""
    match response_format:
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return {"structured_outputs": {"json": schema}}
        case {"type": "json_object"}:
            return {"structured_outputs": {"json_object": True}}
        case _:
            return {}


def check_names(content: Sequence[Candidate], ids: Ids) -> None:
    """`Upstream` if the logprobs name other tokens than `ids`."""
    if not content:
        return
    if content[0].token_id is not None:
        agree = [token.token_id for token in content] == ids.tolist()
    else:
        names = b"token_id:" + ids_text(ids).replace(b",", b",token_id:")
        agree = ",".join([token.token or "" for token in content]).encode() == names
    if not agree:
        raise Upstream("the engine's response has logprobs of other tokens than its token_ids")

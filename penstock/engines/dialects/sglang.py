"""SGLang's chat API. It takes messages or `input_ids`; the response has tokens, version and routes in `meta_info`."""

from typing import Any

import msgspec
import numpy as np

from penstock.engines.dialects.base import ABSENT, MAX_VERSION, Choice, Dialect, MetaInfo
from penstock.errors import Upstream
from penstock.turn import Ids, Logprobs

NO_META_INFO = MetaInfo()


class Sglang(Dialect):
    def required_fields(self, ids: Ids | None = None, routes_from: int = 0) -> dict[str, Any]:
        fields: dict[str, Any] = {"logprobs": True, "return_meta_info": True, "return_prompt_token_ids": True}
        if ids is not None:
            fields["input_ids"] = ids
        if self.settings.routed_experts:
            fields |= {"return_routed_experts": True, "routed_experts_start_len": routes_from}
        return fields

    @staticmethod
    def completion(choice: Choice[Any]) -> tuple[Ids, Logprobs]:
        meta_info = choice.meta_info or NO_META_INFO
        tokens = meta_info.output_token_logprobs
        if tokens is None:
            return Dialect.completion(choice)
        if meta_info.completion_tokens != len(tokens):
            raise Upstream(
                f"meta_info has {len(tokens)} output_token_logprobs but completion_tokens {meta_info.completion_tokens}"
            )
        ids = np.array([token.token_id for token in tokens], np.int32)
        return ids, np.array([token.logprob for token in tokens], np.float32)

    @staticmethod
    def routed_experts(choice: Choice[Any]) -> msgspec.Raw:
        if choice.routed_experts != ABSENT or choice.meta_info is None:
            return choice.routed_experts
        return choice.meta_info.routed_experts

    @staticmethod
    def version(choice: Choice[Any]) -> int | None:
        """`weight_version` is free text: a number if the trainer numbers its updates."""
        version = choice.meta_info.weight_version if choice.meta_info else None
        if not isinstance(version, str):
            return version
        numeric = version.isascii() and version.isdecimal() and len(version) <= len(str(MAX_VERSION))
        return int(version) if numeric and int(version) <= MAX_VERSION else None

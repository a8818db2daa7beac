"""The interface of environments: `Environment`, the policies it is given, and the types they exchange. No I/O.

`builtin/arithmetic.py` is the shortest implementation.
"""

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import orjson

from penstock.environments.scores import AnyScore, Score
from penstock.errors import PolicyFailure
from penstock.turn import HIT_MAX_TOKENS, Ids, Message


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    id: str
    name: str
    text: str
    """the arguments as the policy wrote them"""

    def arguments(self) -> dict[str, Any]:
        """Raises PolicyFailure if they are not a JSON object: catch it to answer the policy, or it ends the rollout."""
        try:
            parsed = orjson.loads(self.text)
        except orjson.JSONDecodeError as error:
            raise PolicyFailure(f"the arguments of {self.name} are not JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise PolicyFailure(f"the arguments of {self.name} are not a JSON object")
        return parsed


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The policy's completion of one turn."""

    message: Message
    """append it unchanged to the messages of the next turn"""
    finish_reason: str
    truncated: bool
    """cut off at `max_seq_len`: the conversation cannot continue"""
    token_ids: Ids = field(default_factory=lambda: np.empty(0, np.int32), repr=False, compare=False)
    """the tokens that the policy sampled"""
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    """set declared fields for the trainer here: a number, or one for each of `token_ids`"""

    @property
    def hit_max_tokens(self) -> bool:
        """Ended by `max_tokens` or the engine's context length rather than by the policy."""
        return self.finish_reason == HIT_MAX_TOKENS

    @property
    def content(self) -> str:
        return self.message.get("content") or ""

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [
            ToolCall(id=call.get("id", ""), name=call["function"]["name"], text=call["function"]["arguments"])
            for call in self.message.get("tool_calls") or []
        ]


class Policy(Protocol):
    """What an environment chats with. `penstock.playing` has the implementation, which records every turn."""

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        agent: str = "",
        train: bool = True,
        **sampling: Any,
    ) -> Completion:
        """One turn; only one may be in flight. `train=False` keeps the completion out of the loss. Pass None to unset
        a sampling default. Raises PolicyFailure at the turn or context limit, InfrastructureFailure if the engine
        fails."""
        ...

    def sample_ids(self) -> Sequence[Ids]:
        """The tokens of each sample so far; per-token `Score.columns` have a number for each, in this order."""
        ...


@dataclass(frozen=True, kw_only=True)
class AgentPolicy:
    """What an environment with `external_agent = True` gets: the endpoint for its agent. One chat at a time."""

    base_url: str
    """OpenAI-compatible, valid for this rollout only; every chat through it is recorded"""
    api_key: str = field(repr=False)
    model: str = "policy"
    """the engine's name for it, `engine.model`"""

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that the `openai` package reads, and OPENAI_MODEL, which it does not."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key, "OPENAI_MODEL": self.model}


@dataclass(frozen=True, kw_only=True)
class PlayedRollout:
    """A finished rollout, as passed to `score_group`."""

    score: Score
    error: str | None
    """the policy's failure, such as a timeout"""
    turns: int
    completion_tokens: int
    conversations: Sequence[Sequence[Message]]
    """the messages of each sample; most rollouts have one"""

    @property
    def last_answer(self) -> str:
        """The policy's last message in its last sample."""
        answers = [message.get("content") for message in self.conversations[-1] if message["role"] == "assistant"]
        return (answers[-1] if answers else None) or ""


class Environment(Protocol):
    @property
    def examples(self) -> Iterable[Any]:
        """A sequence, or any iterable, which is read into a list once."""
        ...

    async def rollout(self, example: Any, policy: Any) -> AnyScore:
        """`policy` is a Policy, or an AgentPolicy if the class sets `external_agent = True`."""
        ...


@runtime_checkable
class ScoresGroups(Protocol):
    """An environment whose rewards depend on the whole group."""

    def score_group(
        self, example: Any, rollouts: Sequence[PlayedRollout]
    ) -> Sequence[AnyScore] | Awaitable[Sequence[AnyScore]]:
        """One score per rollout, in their order; they replace the scores of `rollout`."""
        ...


@runtime_checkable
class Closes(Protocol):
    """An environment that holds resources, such as a process or a connection."""

    async def close(self) -> None:
        """Called once, when the worker shuts down, after the last rollout."""
        ...

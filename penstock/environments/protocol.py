"""What an environment is: examples, and a rollout that talks to a policy and returns a score. Pure words, no I/O.

`arithmetic.py` is the shortest example of one.
"""

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import orjson

from penstock.environments.scores import AnyScore, Score
from penstock.errors import PolicyFailure

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    id: str
    name: str
    text: str
    """the arguments as the policy wrote them"""

    def arguments(self) -> dict[str, Any]:
        """PolicyFailure when they are not a JSON object: catch it to tell the policy, or let it end the rollout."""
        try:
            parsed = orjson.loads(self.text)
        except orjson.JSONDecodeError as error:
            raise PolicyFailure(f"the arguments of {self.name} are not JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise PolicyFailure(f"the arguments of {self.name} are not a JSON object")
        return parsed


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What the policy said in one turn."""

    message: Message
    """to append to the messages of the next turn, as it is"""
    finish_reason: str
    truncated: bool
    """cut at `max_seq_len`: the conversation cannot go on"""

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
    """What an environment talks to; `penstock.playing` has the one that records."""

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        agent: str = "",
        train: bool = True,
        **sampling: Any,
    ) -> Completion:
        """One turn, one at a time. `train=False` keeps what is said out of the loss; a sampling field of None takes a
        default away. PolicyFailure at the turn or context limit, InfrastructureFailure when the engine fails."""
        ...


@dataclass(frozen=True, kw_only=True)
class AgentPolicy:
    """What an environment with `external_agent = True` gets: where its agent finds the model. One chat at a time."""

    base_url: str
    """OpenAI-compatible, this rollout's alone; every chat through it is recorded"""
    api_key: str = field(repr=False)
    model: str = "policy"
    """what the engine calls it, `engine.model`"""

    @property
    def variables(self) -> dict[str, str]:
        """For the environment of a program that uses the `openai` package; the model's name is ours to hand over."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key, "OPENAI_MODEL": self.model}


@dataclass(frozen=True, kw_only=True)
class Played:
    """A finished rollout, as `score_group` sees it."""

    score: Score
    error: str | None
    """what the policy did wrong"""
    turns: int
    completion_tokens: int
    conversations: Sequence[Sequence[Message]]
    """the messages of each sample; most rollouts have one"""

    @property
    def last_answer(self) -> str:
        """What the policy said last, in its last sample."""
        said = [message.get("content") for message in self.conversations[-1] if message["role"] == "assistant"]
        return (said[-1] if said else None) or ""


class Environment(Protocol):
    @property
    def examples(self) -> Iterable[Any]:
        """With a length and an index, or anything else that can be listed once."""
        ...

    async def rollout(self, example: Any, policy: Any) -> AnyScore:
        """`policy` is a Policy; an AgentPolicy where the class says `external_agent = True`."""
        ...


@runtime_checkable
class ScoresGroups(Protocol):
    """An environment whose rewards depend on the whole group."""

    def score_group(
        self, example: Any, rollouts: Sequence[Played]
    ) -> Sequence[AnyScore] | Awaitable[Sequence[AnyScore]]:
        """One score a rollout, in their order; these replace those of `rollout`."""
        ...


@runtime_checkable
class Closes(Protocol):
    """An environment that holds something open: a process, a connection."""

    async def close(self) -> None:
        """Once, at the worker's end, after the last rollout."""
        ...

"""The interface of environments: `Environment`, its policies, and its scores with their validation.
No I/O.

`builtin/arithmetic.py` is the shortest implementation.
"""

import math
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import orjson

from headpond.batches.manifest import AGENT_CHARACTERS
from headpond.errors import PolicyFailure, StageError
from headpond.records.rollout import AGENTS_LIMIT, METRICS_LIMIT, NAME_CHARACTERS, REWARDS_LIMIT
from headpond.turn import HIT_MAX_TOKENS, Ids, Message

METRICS_OF_RECORDING = 14
"""Number of metrics that the worker adds to the environment's in a rollout's reply."""


@dataclass(frozen=True, kw_only=True)
class Score:
    reward: float
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Named parts of the reward, for estimators that use them separately."""
    turn_rewards: Sequence[float] | None = None
    """One reward for each turn, in the order of `policy.chat`, for estimators with one value a
    turn."""
    agent_rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """One reward for each name given to `policy.chat(agent=...)`, for estimators with one value
    an agent."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields for the trainer, declared as `[batch.fields.NAME]`. A field has one number per
    token, one per sample, or one for all. The samples follow one after the other."""


AnyScore = Score | float | Mapping[str, float]
"""A mapping holds named rewards; the reward is their sum."""


def checked_score(returned: AnyScore | None) -> Score:
    """Convert an environment's result to a Score of finite floats. Raise StageError for anything
    else."""
    match returned:
        case Score():
            score = returned
        case Mapping():
            rewards = _numbers("reward", returned, REWARDS_LIMIT)
            return Score(reward=total(rewards), rewards=rewards)
        case _:
            score = Score(reward=_number("the reward", returned))
    return Score(
        reward=_number("the reward", score.reward),
        rewards=_numbers("reward", score.rewards, REWARDS_LIMIT),
        turn_rewards=_turn_rewards(score.turn_rewards),
        agent_rewards=_numbers("agent reward", score.agent_rewards, AGENTS_LIMIT, characters=AGENT_CHARACTERS),
        metrics=_numbers("metric", score.metrics, METRICS_LIMIT - METRICS_OF_RECORDING),
        columns=score.columns,
    )


def total(rewards: Mapping[str, float]) -> float:
    """Sum named rewards: the result is the same in any order. Raise StageError if a float cannot
    hold it."""
    try:
        return math.fsum(rewards.values())
    except OverflowError:
        raise StageError("the sum of the rewards is too large for a float: scale them down") from None


def _turn_rewards(rewards: Sequence[float] | None) -> tuple[float, ...] | None:
    if rewards is None:
        return None
    return tuple(_number(f"the reward of turn {number}", value) for number, value in enumerate(rewards))


def _numbers(
    kind: str, values: Mapping[Any, Any], limit: int, *, characters: int = NAME_CHARACTERS
) -> dict[str, float]:
    if len(values) > limit:
        raise StageError(f"a score has {len(values)} {kind}s: the limit is {limit}")
    for name in values:
        if not isinstance(name, str) or not 0 < len(name) <= characters:
            raise StageError(f"{name!r} is not a valid name for a {kind}: use a string of 1 to {characters} characters")
    return {name: _number(f"the {kind} {name}", value) for name, value in values.items()}


def _number(label: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes | bytearray):  # float() would read these.
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise StageError(f"{label} is {value!r}: return a Score, a number or a mapping of named rewards") from None
    if not math.isfinite(number):
        raise StageError(f"{label} is {number}: it must be finite")
    return number


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    id: str
    name: str
    text: str
    """The arguments as the policy wrote them."""

    def arguments(self) -> dict[str, Any]:
        """Parse the arguments. Raise PolicyFailure if they are not a JSON object. Catch it to
        answer the policy, or it ends the rollout."""
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
    """The assistant's message. Append it unchanged to the messages of the next turn."""
    finish_reason: str
    truncated: bool
    """True if the turn was cut off at `max_seq_len`: the conversation cannot continue."""
    token_ids: Ids = field(default_factory=lambda: np.empty(0, np.int32), repr=False, compare=False)
    """The tokens that the policy sampled."""
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    """Values of declared fields for the trainer, set by the environment: a number, or one for
    each of `token_ids`."""

    @property
    def hit_max_tokens(self) -> bool:
        """True if `max_tokens` or the engine's context length ended the turn, rather than the
        policy."""
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
    """The policy that an environment chats with. `headpond.playing` implements it and records
    every turn."""

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        agent: str = "",
        train: bool = True,
        **sampling: Any,
    ) -> Completion:
        """Play one turn; only one may be in flight. `train=False` excludes the completion from
        the loss. Pass None to unset a sampling default. Raise PolicyFailure at the turn or
        context limit, InfrastructureFailure if the engine fails."""
        ...

    def sample_ids(self) -> Sequence[Ids]:
        """Return the tokens of each sample so far. Per-token `Score.columns` have one number for
        each, in this order."""
        ...


@dataclass(frozen=True, kw_only=True)
class AgentPolicy:
    """The endpoint that an environment with `external_agent = True` gets for its agent. One chat
    at a time."""

    base_url: str
    """OpenAI-compatible URL, valid for this rollout only. Every chat through it is recorded."""
    api_key: str = field(repr=False)
    model: str = "policy"
    """The engine's name for the policy, `engine.model`."""
    control_key: str = field(default="", repr=False)
    """Bearer token for `rewards_url`, for a harness outside of the agent. An agent with this key
    could reward itself."""

    @property
    def rewards_url(self) -> str:
        """URL where a harness posts rewards, metrics and rewards of turns before the rollout
        ends."""
        return f"{self.base_url.removesuffix('/v1')}/rewards"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables by which agents find their API. `docs/agents.md` has the table."""
        return agent_variables(self.base_url, self.api_key, self.model)


def agent_variables(base_url: str, api_key: str, model: str) -> dict[str, str]:
    """Name the variables of agents. Chat Completions and Responses clients get `.../v1`; clients
    of Messages add `/v1` themselves."""
    messages_url = base_url.removesuffix("/v1")
    of_openai = {"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "LLM_BASE_URL": base_url}
    of_anthropic = {"ANTHROPIC_BASE_URL": messages_url, "ANTHROPIC_API_BASE": messages_url}
    keys = ("OPENAI_API_KEY", "CODEX_API_KEY", "LLM_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
    models = (
        "OPENAI_MODEL",
        "ANTHROPIC_MODEL",
        "ANTHROPIC_SMALL_FAST_MODEL",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL",
        "ANTHROPIC_DEFAULT_SONNET_MODEL",
        "ANTHROPIC_DEFAULT_OPUS_MODEL",
        "ANTHROPIC_DEFAULT_FABLE_MODEL",
        "CLAUDE_CODE_SUBAGENT_MODEL",
    )
    prefixed = dict.fromkeys(("LLM_MODEL", "AIDER_MODEL", "MSWEA_MODEL_NAME"), f"openai/{model}")
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    return {
        **of_openai,
        **of_anthropic,
        **dict.fromkeys(keys, api_key),
        **dict.fromkeys(models, model),
        **prefixed,
        **quiet,
    }


@dataclass(frozen=True, kw_only=True)
class PlayedRollout:
    """A finished rollout, as passed to `score_group`."""

    score: Score
    error: str | None
    """The policy's failure, such as a timeout."""
    turns: int
    completion_tokens: int
    conversations: Sequence[Sequence[Message]]
    """The messages of each sample. Most rollouts have one sample."""

    @property
    def last_answer(self) -> str:
        """The policy's last message in its last sample."""
        answers = [message.get("content") for message in self.conversations[-1] if message["role"] == "assistant"]
        return (answers[-1] if answers else None) or ""


class Environment(Protocol):
    @property
    def examples(self) -> Iterable[Any]:
        """A sequence, or any iterable; an iterable is read into a list once."""
        ...

    async def rollout(self, example: Any, policy: Any) -> AnyScore | None:
        """Play one rollout. `policy` is a Policy, or an AgentPolicy if the class sets
        `external_agent = True`. Return None if an external agent's score is posted to
        `policy.rewards_url`."""
        ...


@runtime_checkable
class ScoresGroups(Protocol):
    """An environment whose rewards depend on the whole group."""

    def score_group(
        self, example: Any, rollouts: Sequence[PlayedRollout]
    ) -> Sequence[AnyScore] | Awaitable[Sequence[AnyScore]]:
        """Return one score per rollout, in their order. They replace the scores of `rollout`."""
        ...


@runtime_checkable
class Closes(Protocol):
    """An environment that holds resources, such as a process or a connection."""

    async def close(self) -> None:
        """Release the resources. Called once, when the worker shuts down, after the last
        rollout."""
        ...

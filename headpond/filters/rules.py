"""The built-in rules and their settings: token rules find a matching token, group rules match
rewards.

Thresholds are float64 and hold exactly, although logprobs are compared as float32.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from headpond.declarations.sections import Reader, Section, read_by
from headpond.errors import StageError
from headpond.turn import HIT_MAX_TOKENS

REPETITION = "repetition"
"""Finish reason of vLLM's repetition detection."""
EQUAL_REWARDS = 1e-9
"""Largest difference of equal rewards, relative to the largest reward or 1. A tolerance is
needed: the mean of three 0.1 is not 0.1."""


class Mode(StrEnum):
    """What happens to a rollout that matches a filter."""

    OFF = "off"
    """The filter does not run."""
    MONITOR = "monitor"
    """A match is only counted."""
    MASK = "mask"
    """The rollout is delivered with loss mask 0. The group and the loss's denominator stay the
    same."""
    DROP = "drop"
    """The rollout is not delivered."""


@dataclass(frozen=True, kw_only=True)
class RolloutTokens:
    """The input of a token rule: one rollout of T tokens in S samples. T and S may be 0."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    """[T], not 0 where a sampled token counts in the loss."""
    logprobs: NDArray[np.float32]
    sample_offsets: NDArray[np.int64]
    """[S + 1], from 0 to T."""
    truncated: NDArray[np.uint8]
    """[S], not 0 where the sample was cut to the limit."""
    overlong_prompt: NDArray[np.uint8]
    """[S], not 0 where the sample's prompt alone was over the limit."""
    version_first: int
    """Lowest policy version that may have sampled one of the tokens; -1 if nothing was
    generated."""
    version_now: int
    finish_reason: str = ""
    """The engine's finish reason of the last turn: `stop`, `length`, `tool_calls`, `repetition`,
    ..."""

    def __post_init__(self) -> None:
        tokens, samples = len(self.input_ids), len(self.truncated)
        bounds = self.sample_offsets[[0, -1]].tolist() if len(self.sample_offsets) == samples + 1 else None
        aligned = tokens == len(self.loss_mask) == len(self.logprobs) and samples == len(self.overlong_prompt)
        if not aligned or bounds != [0, tokens]:
            raise StageError(
                f"a rollout's columns have different lengths: {tokens} input_ids, {len(self.loss_mask)} loss_mask, "
                f"{len(self.logprobs)} logprobs, {samples} truncated, {len(self.overlong_prompt)} overlong_prompt, "
                f"sample_offsets {self.sample_offsets}"
            )


# The index counts all of the rollout's tokens, context included. prime-rl counts sampled tokens
# only.
FindToken = Callable[[RolloutTokens], int | None]
"""A token rule: returns the index of the token where the rollout matches, or None."""


class Gibberish(Section):
    """A rare token that the policy sampled although it is less likely than a uniform draw from the vocabulary."""

    mode: Mode = Mode.MONITOR
    """What happens to a matching rollout: `off`, `monitor` (count), `mask` (no loss) or `drop`."""
    token_id_threshold: int = 100_000
    """Tokens with higher ids are rare: tokenizers give rarer tokens higher ids."""
    logprob_offset: float = 2.0
    """How far below the uniform draw a token's logprob must be, in nats."""

    def find(self, rollout: RolloutTokens, *, vocab_size: int) -> int | None:
        limit = -float32_at_most(math.log(vocab_size) + self.logprob_offset)
        # Few tokens are unlikely, so the other columns are hardly read.
        unlikely = np.flatnonzero(rollout.logprobs < limit)
        rare = unlikely[rollout.input_ids[unlikely] > self.token_id_threshold]
        sampled = rare[rollout.loss_mask[rare] != 0]
        return int(sampled[0]) if len(sampled) else None


class Repetition(Section):
    """A long run of sampled tokens that were almost certain. Context between turns does not end the run. A rollout
    whose last turn the engine ended for its repetition matches too."""

    mode: Mode = Mode.MONITOR
    """What happens to a matching rollout: `off`, `monitor` (count), `mask` (no loss) or `drop`."""
    window: PositiveInt = 3_000
    """Length of the run, in sampled tokens."""
    prob_threshold: Annotated[float, Field(gt=0, lt=1)] = 0.99
    """Probability above which a token is almost certain."""

    def find(self, rollout: RolloutTokens) -> int | None:
        """Return the token that completes the first window."""
        if rollout.finish_reason == REPETITION:
            return max(len(rollout.input_ids) - 1, 0)
        sampled = rollout.loss_mask != 0
        unsure = sampled & ~(rollout.logprobs > float32_at_most(math.log(self.prob_threshold)))
        if no_gap(unsure, self.window):
            return None
        for start, end in pairwise(rollout.sample_offsets.tolist()):
            breaks = np.concatenate(([start - 1], start + np.flatnonzero(unsure[start:end]), [end]))
            for stretch in np.flatnonzero(np.diff(breaks) > self.window):
                stretch_start = breaks[stretch] + 1
                run = np.flatnonzero(sampled[stretch_start : breaks[stretch + 1]])
                if len(run) >= self.window:
                    return int(stretch_start + run[self.window - 1])
        return None


class Overlong(Section):
    """A sample that was cut at `policy.max_seq_len`, or a rollout whose last turn ended at a limit of tokens:
    `max_tokens`, or the engine's context length."""

    mode: Mode = Mode.MASK
    """What happens to a matching rollout: `off`, `monitor` (count), `mask` (no loss) or `drop`."""

    def find(self, rollout: RolloutTokens) -> int | None:
        """Return the last token before the first cut."""
        sample = first_true(rollout.truncated | rollout.overlong_prompt)
        if sample is None and rollout.finish_reason != HIT_MAX_TOKENS:
            return None
        end = len(rollout.input_ids) if sample is None else int(rollout.sample_offsets[sample + 1])
        return max(end - 1, 0)


class Stale(Section):
    """Rollouts of a policy that is too old. Checked when a group is filtered, while a rollout runs, and when a step is
    composed and sealed."""

    declared = read_by(Reader.ORCHESTRATOR, Reader.COMPUTE)

    mode: Mode = Mode.DROP
    """What happens to a matching rollout: `off`, `monitor` (count), `mask` (no loss) or `drop`."""
    max_off_policy_steps: NonNegativeInt = 8
    """How many policy versions the lowest version of a rollout's tokens may be behind the newest one."""

    def find(self, rollout: RolloutTokens) -> int | None:
        """Return the first sampled token if the rollout is stale."""
        stale = is_stale(
            version_first=rollout.version_first,
            version_now=rollout.version_now,
            max_off_policy_steps=self.max_off_policy_steps,
        )
        return first_true(rollout.loss_mask) or 0 if stale else None


def is_stale(*, version_first: int, version_now: int, max_off_policy_steps: int) -> bool:
    """Compare versions. The filter, rollouts in flight, composing and sealing all use this rule.

    `version_first` is the lowest policy version of the tokens. -1 (nothing generated) is never
    stale.
    """
    return version_first >= 0 and version_now - version_first > max_off_policy_steps


def first_true(flags: NDArray[Any]) -> int | None:
    hits = np.flatnonzero(flags)
    return int(hits[0]) if len(hits) else None


def no_gap(flags: NDArray[np.bool_], width: int) -> bool:
    """Return True only if every `width` neighbours contain a True. This check halves the time for a
    rollout without a long run, which nearly all are.

    A stretch of `width` values contains a whole block of half that width.
    """
    block = (width + 1) // 2
    return bool(flags[: len(flags) // block * block].reshape(-1, block).any(axis=1).all())


def float32_at_most(limit: float) -> np.float32:
    """Return the largest float32 <= limit. A float32 exceeds it exactly when it exceeds the
    float64 limit."""
    rounded = np.float32(limit)
    return rounded if float(rounded) <= limit else np.nextafter(rounded, np.float32(-np.inf))


@dataclass(frozen=True, kw_only=True)
class GroupRewards:
    """The input of a group rule: the reward of every scored rollout, before and after length
    shaping."""

    rewards: NDArray[np.float64]
    shaped: NDArray[np.float64]
    judged: NDArray[np.float64] | None = None
    """The estimator's own values, if `zero_variance` compares these instead of `shaped`."""


MatchGroup = Callable[[GroupRewards], bool]
"""A group rule: returns whether the group matches."""


class ZeroVariance(Section):
    """Groups whose shaped rewards are all equal (of `gdpo`, `grpo_process` and `grpo_agents`: whose values are all 0).
    Applies to estimators that learn from differences within a group."""

    mode: Mode = Mode.DROP
    """What happens to the rollouts of a matching group: `off`, `monitor` (count), `mask` (no loss) or `drop`."""

    def matches(self, group: GroupRewards) -> bool:
        return rewards_are_equal(group.shaped if group.judged is None else group.judged)


class Difficulty(Section):
    """Groups that are too hard or too easy, by the mean of their rewards before shaping."""

    mode: Mode = Mode.OFF
    """What happens to the rollouts of a matching group: `off`, `monitor` (count), `mask` (no loss) or `drop`."""
    low: float = 0.0
    """Groups with a lower mean reward match."""
    high: float = 1.0
    """Groups with a higher mean reward match."""

    @model_validator(mode="after")
    def _check_bounds(self) -> "Difficulty":
        if not self.low <= self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high}): all groups would match")
        return self

    def matches(self, group: GroupRewards) -> bool:
        return not self.low <= math.fsum(group.rewards) / len(group.rewards) <= self.high


def rewards_are_equal(rewards: NDArray[np.float64]) -> bool:
    return bool(np.ptp(rewards) <= EQUAL_REWARDS * max(1.0, np.abs(rewards).max()))

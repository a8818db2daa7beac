"""The rules, each with its settings: what makes a rollout or a group match, and at which token.

Thresholds are float64 and hold exactly, although the tokens' logprobs are compared as the float32 they are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, StageError
from penstock.filters.staleness import is_stale
from penstock.filters.verdicts import Mode

EQUAL_REWARDS = 1e-9
"""Spread up to which rewards are one, relative to the largest (at least 1): the mean of three 0.1 is not 0.1."""


@dataclass(frozen=True, kw_only=True)
class RolloutTokens:
    """What a filter sees of a rollout of T tokens in S samples; both may be 0."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    """[T], not 0 where the policy sampled the token."""
    logprobs: NDArray[np.float32]
    sample_offsets: NDArray[np.int64]
    """[S + 1], from 0 to T."""
    truncated: NDArray[np.uint8]
    """[S], not 0 where the sample was cut to the limit."""
    overlong_prompt: NDArray[np.uint8]
    """[S], not 0 where its prompt alone was over the limit."""
    version_first: int
    """Policy version of the first generated token; -1 where nothing was generated."""
    version_now: int

    def __post_init__(self) -> None:
        tokens, samples = len(self.input_ids), len(self.truncated)
        bounds = self.sample_offsets[[0, -1]].tolist() if len(self.sample_offsets) == samples + 1 else None
        aligned = tokens == len(self.loss_mask) == len(self.logprobs) and samples == len(self.overlong_prompt)
        if not aligned or bounds != [0, tokens]:
            raise StageError(
                f"a rollout's arrays disagree, its columns were put together wrongly: {tokens} input_ids, "
                f"{len(self.loss_mask)} loss_mask, {len(self.logprobs)} logprobs, {samples} truncated, "
                f"{len(self.overlong_prompt)} overlong_prompt, sample_offsets {self.sample_offsets}"
            )


@dataclass(frozen=True, kw_only=True)
class GroupRewards:
    """What a group filter sees: the reward of every scored rollout, as given and after length shaping."""

    rewards: NDArray[np.float64]
    shaped: NDArray[np.float64]


FindToken = Callable[[RolloutTokens], int | None]
"""The index of the token where a rollout matches; None where it does not."""
MatchGroup = Callable[[GroupRewards], bool]


@dataclass(frozen=True, kw_only=True)
class Gibberish:
    """A rare token that the policy itself held to be less likely than a uniform draw from the vocabulary."""

    mode: Mode = Mode.MONITOR
    token_id_threshold: int = 100_000
    """Tokenizers give rarer tokens higher ids."""
    logprob_offset: float = 2.0
    """Nats below the uniform draw."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.logprob_offset):
            raise ConfigError(f"filters.gibberish.logprob_offset is {self.logprob_offset}: give finite nats")

    def find(self, rollout: RolloutTokens, *, vocab_size: int) -> int | None:
        limit = -float32_at_most(math.log(vocab_size) + self.logprob_offset)
        unlikely = np.flatnonzero(rollout.logprobs < limit)  # few: the rest of the columns is hardly read
        rare = unlikely[rollout.input_ids[unlikely] > self.token_id_threshold]
        sampled = rare[rollout.loss_mask[rare] != 0]
        return int(sampled[0]) if len(sampled) else None


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """A long run of sampled tokens that were all but certain; context between turns does not end it."""

    mode: Mode = Mode.MONITOR
    window: int = 3_000
    """Sampled tokens."""
    prob_threshold: float = 0.99

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError(f"filters.repetition.window is {self.window}: give a number of tokens, at least 1")
        if not 0 < self.prob_threshold < 1:
            raise ConfigError(f"filters.repetition.prob_threshold is {self.prob_threshold}: give one between 0 and 1")

    def find(self, rollout: RolloutTokens) -> int | None:
        """The token that completes the first window."""
        sampled = rollout.loss_mask != 0
        unsure = sampled & ~(rollout.logprobs > float32_at_most(math.log(self.prob_threshold)))
        if no_gap(unsure, self.window):
            return None
        for start, end in pairwise(rollout.sample_offsets.tolist()):
            breaks = np.concatenate(([start - 1], start + np.flatnonzero(unsure[start:end]), [end]))
            for stretch in np.flatnonzero(np.diff(breaks) > self.window):
                after = breaks[stretch] + 1
                run = np.flatnonzero(sampled[after : breaks[stretch + 1]])
                if len(run) >= self.window:
                    return int(after + run[self.window - 1])
        return None


@dataclass(frozen=True, kw_only=True)
class Overlong:
    mode: Mode = Mode.MASK

    def find(self, rollout: RolloutTokens) -> int | None:
        """The last token before the first cut."""
        sample = first_true(rollout.truncated | rollout.overlong_prompt)
        return None if sample is None else max(int(rollout.sample_offsets[sample + 1]) - 1, 0)


@dataclass(frozen=True, kw_only=True)
class Stale:
    mode: Mode = Mode.DROP
    max_off_policy_steps: int = 8

    def __post_init__(self) -> None:
        if self.max_off_policy_steps < 0:
            raise ConfigError(f"filters.stale.max_off_policy_steps is {self.max_off_policy_steps}: give 0 or more")

    def find(self, rollout: RolloutTokens) -> int | None:
        """The first sampled token, whose version is the one that counts."""
        stale = is_stale(
            version_first=rollout.version_first,
            version_now=rollout.version_now,
            max_off_policy_steps=self.max_off_policy_steps,
        )
        return first_true(rollout.loss_mask) or 0 if stale else None


@dataclass(frozen=True, kw_only=True)
class ZeroVariance:
    mode: Mode = Mode.DROP

    def matches(self, group: GroupRewards) -> bool:
        return rewards_are_equal(group.shaped)


@dataclass(frozen=True, kw_only=True)
class Difficulty:
    """Groups too hard or too easy to learn from, by the mean of their rewards before shaping."""

    mode: Mode = Mode.OFF
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ConfigError(f"filters.difficulty.low is {self.low}, above high = {self.high}: nothing would pass")

    def matches(self, group: GroupRewards) -> bool:
        return not self.low <= math.fsum(group.rewards) / len(group.rewards) <= self.high


def rewards_are_equal(rewards: NDArray[np.float64]) -> bool:
    return bool(np.ptp(rewards) <= EQUAL_REWARDS * max(1.0, np.abs(rewards).max()))


def first_true(flags: NDArray[Any]) -> int | None:
    hits = np.flatnonzero(flags)
    return int(hits[0]) if len(hits) else None


def no_gap(flags: NDArray[np.bool_], width: int) -> bool:
    """Whether it is plain that no `width` neighbours are all false: any such stretch holds a whole block of half that.

    Halves the time for a rollout without a long run, which is what nearly all are.
    """
    block = (width + 1) // 2
    return bool(flags[: len(flags) // block * block].reshape(-1, block).any(axis=1).all())


def float32_at_most(limit: float) -> np.float32:
    """The largest float32 <= limit: a float32 is above it exactly when it is above the float64 limit."""
    rounded = np.float32(limit)
    return rounded if float(rounded) <= limit else np.nextafter(rounded, np.float32(-np.inf))

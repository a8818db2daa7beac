"""Filters over a rollout's tokens and over a group's rewards, and the verdicts they return.

Every filter is applied to every rollout, so one filter's count never depends on another filter; only a drop's reason
depends on their order. Filters change neither rollouts nor rewards: a dropped rollout stays in its group's baseline.
"""

from penstock.filters.judging import (
    CustomFilter,
    CustomGroupFilter,
    Filter,
    FilterSettings,
    Match,
    Verdict,
    count_matches,
    group_filters,
    judge,
    judge_group,
    rollout_filters,
)
from penstock.filters.rules import (
    Difficulty,
    FindToken,
    Gibberish,
    GroupRewards,
    MatchGroup,
    Mode,
    Overlong,
    Repetition,
    RolloutTokens,
    Stale,
    ZeroVariance,
    is_stale,
    rewards_are_equal,
)

__all__ = [
    "CustomFilter",
    "CustomGroupFilter",
    "Difficulty",
    "Filter",
    "FilterSettings",
    "FindToken",
    "Gibberish",
    "GroupRewards",
    "Match",
    "MatchGroup",
    "Mode",
    "Overlong",
    "Repetition",
    "RolloutTokens",
    "Stale",
    "Verdict",
    "ZeroVariance",
    "count_matches",
    "group_filters",
    "is_stale",
    "judge",
    "judge_group",
    "rewards_are_equal",
    "rollout_filters",
]

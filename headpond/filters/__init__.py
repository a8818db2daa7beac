"""Filters over a rollout's tokens and over a group's rewards, and the verdicts they return.

Every rollout passes through every filter: one filter's count never depends on another filter.
The order decides only which filter names the reason of a drop. Filters change neither rollouts
nor rewards: a dropped rollout stays in its group's baseline.
"""

from headpond.filters.judging import (
    CustomFilter,
    CustomGroupFilter,
    FilterSettings,
    Verdict,
    count_matches,
    group_filters,
    judge,
    judge_group,
    rollout_filters,
)
from headpond.filters.rules import (
    Difficulty,
    Gibberish,
    GroupRewards,
    Mode,
    Overlong,
    Repetition,
    RolloutTokens,
    Stale,
    is_stale,
    rewards_are_equal,
)

__all__ = [
    "CustomFilter",
    "CustomGroupFilter",
    "Difficulty",
    "FilterSettings",
    "Gibberish",
    "GroupRewards",
    "Mode",
    "Overlong",
    "Repetition",
    "RolloutTokens",
    "Stale",
    "Verdict",
    "count_matches",
    "group_filters",
    "is_stale",
    "judge",
    "judge_group",
    "rewards_are_equal",
    "rollout_filters",
]

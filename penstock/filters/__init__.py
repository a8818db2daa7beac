"""Filters over a rollout's tokens and over a group's rewards, and the verdicts they return.

Every filter is applied to every rollout, so one filter's count never depends on another filter; only a drop's reason
depends on their order. Filters change neither rollouts nor rewards: a dropped rollout stays in its group's baseline.
"""

from penstock.filters.group_rules import Difficulty, GroupRewards, MatchGroup, ZeroVariance, rewards_are_equal
from penstock.filters.judging import (
    CustomFilter,
    CustomGroupFilter,
    Filter,
    FilterSettings,
    group_filters,
    judge,
    judge_group,
    rollout_filters,
)
from penstock.filters.token_rules import FindToken, Gibberish, Overlong, Repetition, RolloutTokens, Stale, is_stale
from penstock.filters.verdicts import Match, Mode, Verdict, count_matches

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

"""Which rollouts count: filters over a rollout's tokens, filters over a group's rewards, and the verdicts they give.

Every filter looks at every rollout, so a filter's count never depends on another filter; only a drop's reason depends
on their order. Nothing here changes a rollout or its reward: a dropped rollout stays in its group's baseline.
"""

from penstock.filters.judging import Filter, FilterSettings, group_filters, judge, judge_group, rollout_filters
from penstock.filters.rules import (
    Difficulty,
    FindToken,
    Gibberish,
    GroupRewards,
    MatchGroup,
    Overlong,
    Repetition,
    RolloutTokens,
    Stale,
    ZeroVariance,
    rewards_are_equal,
)
from penstock.filters.staleness import is_stale
from penstock.filters.verdicts import Counts, Match, Mode, Verdict, count

__all__ = [
    "Counts",
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
    "count",
    "group_filters",
    "is_stale",
    "judge",
    "judge_group",
    "rewards_are_equal",
    "rollout_filters",
]

"""Scores that a harness posts, together with those that an environment returns."""

import pytest

from headpond.environments.protocol import Score
from headpond.errors import BadRequest, StageError
from headpond.playing.posted_scores import PostedScore, completed, read_posted
from headpond.records.rollout import REWARDS_LIMIT


def test_what_the_environment_returns_holds_and_what_was_posted_besides_is_added() -> None:
    posted = PostedScore(reward=5.0, rewards={"tests": 1.0, "style": 0.5}, metrics={"passed": 3.0})
    score = completed(Score(reward=2.0, rewards={"tests": 0.0}, metrics={"seconds": 1.0}), posted)
    assert score.reward == 2.0
    assert score.rewards == {"tests": 0.0, "style": 0.5}
    assert score.metrics == {"passed": 3.0, "seconds": 1.0}


def test_both_together_have_the_limits_of_one_score() -> None:
    posted = PostedScore(rewards={f"posted {number}": 1.0 for number in range(REWARDS_LIMIT)})
    returned = Score(reward=1.0, rewards={"one more": 1.0})
    with pytest.raises(StageError, match=f"{REWARDS_LIMIT + 1} rewards.* {REWARDS_LIMIT}"):
        completed(returned, posted)


def test_posted_rewards_whose_sum_is_too_large_are_refused() -> None:
    with pytest.raises(BadRequest, match="sum of the rewards"):
        read_posted(b'{"rewards": {"tests": 1e308, "style": 1e308}}', PostedScore())

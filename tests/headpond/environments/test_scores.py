import numpy as np
import pytest

from headpond.environments.protocol import Score, checked_score
from headpond.errors import StageError
from headpond.records.rollout import METRICS_LIMIT, NAME_CHARACTERS, REWARDS_LIMIT


def test_a_score_may_be_a_number_a_mapping_or_a_score() -> None:
    assert checked_score(True) == Score(reward=1.0)
    assert checked_score(np.float32(0.5)) == Score(reward=0.5)
    assert checked_score(np.array(0.5)) == Score(reward=0.5)  # pyright: ignore[reportArgumentType]
    assert checked_score({"right": 1, "short": 0.5}) == Score(reward=1.5, rewards={"right": 1.0, "short": 0.5})
    full = Score(reward=2, rewards={"right": 1}, metrics={"steps": np.int64(3)})
    assert checked_score(full) == Score(reward=2.0, rewards={"right": 1.0}, metrics={"steps": 3.0})


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (None, "the reward is None: return a Score, a number or a mapping"),
        ("good", "the reward is 'good'"),
        ("1.0", "the reward is '1.0': return a Score, a number or a mapping"),
        (b"1.0", "the reward is b'1.0': return a Score, a number or a mapping"),
        (np.str_("1.0"), "the reward is .*'1.0'"),
        ({"right": "1"}, "the reward right is '1'"),
        (Score(reward="1.0"), "the reward is '1.0'"),  # pyright: ignore[reportArgumentType]
        (Score(reward=1.0, turn_rewards="10"), "the reward of turn 0 is '1'"),  # pyright: ignore[reportArgumentType]
        (float("nan"), "the reward is nan: it must be finite"),
        ({"right": float("inf")}, "the reward right is inf"),
        ({"right": 1e308, "short": 1e308}, "the sum of the rewards is too large"),
        (Score(reward=10**400), "the reward is inf: it must be finite"),
        (Score(reward=1.0, metrics={"steps": float("nan")}), "the metric steps is nan"),
        (Score(reward=1.0, metrics={"x" * (NAME_CHARACTERS + 1): 1.0}), "is not a valid name for a metric"),
        ({1: 1.0}, "1 is not a valid name for a reward"),
        ({str(number): 1.0 for number in range(REWARDS_LIMIT + 1)}, "the limit is 8"),
        (Score(reward=0.0, metrics={str(number): 1.0 for number in range(METRICS_LIMIT + 1)}), "the limit is 23"),
    ],
)
def test_an_invalid_score_is_refused(score: object, message: str) -> None:
    with pytest.raises(StageError, match=message):
        checked_score(score)  # pyright: ignore[reportArgumentType]

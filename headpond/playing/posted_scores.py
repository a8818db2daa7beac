"""The score that a harness posts to a session, in place of the environment or beside it."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from headpond.environments.protocol import Score, checked_score, total
from headpond.errors import BadRequest, StageError

Numbers = Mapping[str, float]
TurnRewards = Annotated[tuple[float, ...], msgspec.Meta(max_length=100_000)]
"""One for each recorded turn."""


class PostedScore(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True, omit_defaults=True):
    """Fields as in `Score`."""

    reward: float | None = None
    """default: the sum of `rewards`"""
    rewards: Numbers = {}
    turn_rewards: TurnRewards | None = None
    agent_rewards: Numbers = {}
    metrics: Numbers = {}

    @property
    def rewarded(self) -> bool:
        return self.reward is not None or bool(self.rewards)

    def check(self) -> None:
        """Raises StageError if it is not a valid score."""
        _ = self.score

    @property
    def score(self) -> Score:
        """Raises StageError if it is not a valid one."""
        reward = total(self.rewards) if self.reward is None else self.reward
        return checked_score(
            Score(
                reward=reward,
                rewards=self.rewards,
                turn_rewards=self.turn_rewards,
                agent_rewards=self.agent_rewards,
                metrics=self.metrics,
            )
        )

    def updated(self, later: "PostedScore") -> "PostedScore":
        """What a later request says of the same name holds."""
        return PostedScore(
            reward=self.reward if later.reward is None else later.reward,
            rewards={**self.rewards, **later.rewards},
            turn_rewards=self.turn_rewards if later.turn_rewards is None else later.turn_rewards,
            agent_rewards={**self.agent_rewards, **later.agent_rewards},
            metrics={**self.metrics, **later.metrics},
        )


NOTHING_POSTED = PostedScore()
POSTED = msgspec.json.Decoder(PostedScore)


def read_posted(body: bytes, before: PostedScore) -> PostedScore:
    """The body of a request, and what was posted before it. Raises BadRequest."""
    try:
        posted = before.updated(POSTED.decode(body or b"{}"))
        posted.check()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the score cannot be read: {error}") from None
    except StageError as error:
        raise BadRequest(str(error)) from None
    return posted


def completed(returned: Score | None, posted: PostedScore) -> Score:
    """The score of a rollout: what its environment returned holds, and what was posted besides is added. StageError if
    neither has a reward, or both together exceed the limits of a score."""
    if returned is None and not posted.rewarded:
        raise StageError(
            "the environment returned None, and no reward was posted to policy.rewards_url: return a Score, or post one"
        )
    score = posted.score
    if returned is None:
        return score
    return checked_score(
        Score(
            reward=returned.reward,
            rewards={**score.rewards, **returned.rewards},
            turn_rewards=score.turn_rewards if returned.turn_rewards is None else returned.turn_rewards,
            agent_rewards={**score.agent_rewards, **returned.agent_rewards},
            metrics={**score.metrics, **returned.metrics},
            columns=returned.columns,
        )
    )

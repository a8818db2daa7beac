"""The score that a harness posts to a session, in place of the environment's score or beside it."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from headpond.environments.protocol import Score, checked_score, total
from headpond.errors import BadRequest, StageError

Numbers = Mapping[str, float]
# One reward for each recorded turn.
TurnRewards = Annotated[tuple[float, ...], msgspec.Meta(max_length=100_000)]


class PostedScore(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True, omit_defaults=True):
    """A posted score, with the fields of `Score`."""

    reward: float | None = None  # Defaults to the sum of `rewards`.
    rewards: Numbers = {}
    turn_rewards: TurnRewards | None = None
    agent_rewards: Numbers = {}
    metrics: Numbers = {}

    @property
    def rewarded(self) -> bool:
        return self.reward is not None or bool(self.rewards)

    @property
    def score(self) -> Score:
        """The posted score, checked. Raises StageError if it is not valid."""
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

    def updated(self, post: "PostedScore") -> "PostedScore":
        """Merge a later post: its values replace earlier ones of the same name."""
        return PostedScore(
            reward=self.reward if post.reward is None else post.reward,
            rewards={**self.rewards, **post.rewards},
            turn_rewards=self.turn_rewards if post.turn_rewards is None else post.turn_rewards,
            agent_rewards={**self.agent_rewards, **post.agent_rewards},
            metrics={**self.metrics, **post.metrics},
        )


NOTHING_POSTED = PostedScore()
POSTED = msgspec.json.Decoder(PostedScore)


def read_posted(body: bytes, posted_earlier: PostedScore) -> PostedScore:
    """Decode the body of a request and merge it into the earlier posts. Raise BadRequest."""
    try:
        posted = posted_earlier.updated(POSTED.decode(body or b"{}"))
        _ = posted.score  # checked
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the score cannot be read: {error}") from None
    except StageError as error:
        raise BadRequest(str(error)) from None
    return posted


def completed(returned: Score | None, posted: PostedScore) -> Score:
    """Merge the environment's score and the posted one; the environment's values win. Raise
    StageError if neither has a reward, or both together exceed the limits of a score."""
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

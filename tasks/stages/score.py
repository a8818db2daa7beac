"""Score: the rewards of a whole group, computed by the environment that played it."""

from itertools import islice
from typing import Annotated

from pydantic import Field, FiniteFloat

from headpond.broker.queues import Queue
from headpond.event_loop.offload import in_io_thread
from headpond.records.inputs import GroupInputs
from headpond.records.rollout import REWARDS_LIMIT, Name
from headpond.records.wire import Result
from headpond.tasks import inputs
from headpond.tasks.stage import Call, PlanMessage, Stage, Subject


class ScoreMessage(PlanMessage):
    environment: str


class ScoreResult(Result):
    rewards: dict[str, FiniteFloat]
    # name -> rollout -> that part of its reward
    named: Annotated[dict[Name, dict[str, FiniteFloat]], Field(max_length=REWARDS_LIMIT)] = {}


async def score(call: Call[ScoreMessage]) -> ScoreResult:
    from headpond.playing.rollout import score_group

    environment = call.player.environment(call.message.environment)
    group = await in_io_thread(inputs.read, call.store, call.message.plan, GroupInputs)
    scores = await score_group(call.store, environment, group.example, list(group.members.values()))
    scored = dict(zip(group.members, scores, strict=True))
    names = dict.fromkeys(name for score in scores for name in score.rewards)
    return ScoreResult(
        rewards={rollout: score.reward for rollout, score in scored.items()},
        named={
            name: {rollout: score.rewards[name] for rollout, score in scored.items() if name in score.rewards}
            for name in islice(names, REWARDS_LIMIT)
        },
    )


STAGE = Stage(
    name="score",
    queue=Queue.ROLLOUTS,
    task="headpond.rollouts.score",
    subject=Subject.GROUP,
    message=ScoreMessage,
    result=ScoreResult,
    body=score,
)

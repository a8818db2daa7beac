"""Play: one rollout. The policy plays an example in its environment, and the environment scores it."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from headpond.broker.queues import Queue
from headpond.records.rollout import RolloutResult
from headpond.tasks.stage import Call, Message, Stage, Subject

if TYPE_CHECKING:  # the orchestrator reads this module for message and result
    from headpond.environments.loading import LoadedEnvironment
    from headpond.tasks.player import Player

ABANDONED_LIMIT = 4  # replicas differ by one version, at most a few, when a trainer goes back


class PlayMessage(Message):
    environment: str
    example: int
    seed: int
    policy_version: int = 0  # newest version that the trainer had published at submission
    least_version: int = 0  # replicas with older weights serve nothing that is trained on
    # nor do replicas with these: the trainer has resumed from an older checkpoint
    abandoned_versions: Annotated[tuple[int, ...], Field(max_length=ABANDONED_LIMIT)] = ()


async def play(call: Call[PlayMessage]) -> RolloutResult:
    environment = call.player.environment(call.message.environment)
    await call.player.require_store_of(call.message.run)
    return await play_in(call.player, environment, call.message, call.execution)


async def play_in(
    player: "Player", environment: "LoadedEnvironment", message: PlayMessage, execution: str
) -> RolloutResult:
    from headpond.engines.replicas.selection import Orders
    from headpond.playing.rollout import Attempt
    from headpond.playing.rollout import play as play_rollout

    resources = player.resources_of(message.environment)
    orders = Orders(
        run=message.run,
        sequence=message.sequence,
        version=message.policy_version,
        least_version=message.least_version,
        abandoned=message.abandoned_versions,
    )
    resources.client.replicas.follow(orders)
    attempt = Attempt(
        run=message.run,
        rollout=message.job,
        attempt=message.attempt,
        execution=execution,
        seed=message.seed,
        timeout_s=message.timeout_s,
        orders=orders,
    )
    return await play_rollout(resources, environment, message.example, attempt)


STAGE = Stage(
    name="play",
    queue=Queue.ROLLOUTS,
    task="headpond.rollouts.run",
    subject=Subject.GROUP,
    message=PlayMessage,
    result=RolloutResult,
    body=play,
    gate="rollouts",
    ends_itself=True,
)

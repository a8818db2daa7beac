"""The files that jobs read and write in the store, because a group or a step may be large."""

from pydantic import FiniteFloat

from headpond.records.rollout import RolloutResult
from headpond.records.wire import WireModel


class GroupInputs(WireModel):
    """The finished rollouts of a group: the jobs of its stages read them."""

    group: str
    environment: str
    example: int
    policy_version: int  # newest version when the file was written
    members: dict[str, RolloutResult]  # rollout -> its result


class StepValues(WireModel):
    """The rollouts of a step in the order of their ids, one entry each, and the estimator's state: the batch phase
    reads them."""

    rollouts: list[str]
    groups: list[str]
    environments: list[str]
    examples: list[int]
    values: list[float]  # results of the group phase
    rewards: list[float]
    named_rewards: list[dict[str, float]]
    failed: list[bool]  # whether the policy failed
    agents: list[dict[str, int]]
    agent_rewards: list[dict[str, float]] = []
    # keys of the files with the values of the turns; none if the estimator does not answer
    # per turn
    credit: list[str | None] = []
    completion_tokens: list[int]
    # the estimator's state after the step before: JSON text that only `headpond.advantages`
    # reads
    state: str | None


class StepAdvantages(WireModel):
    """The batch phase writes them."""

    advantages: dict[str, FiniteFloat]
    state: str | None  # the estimator's state after this step
    credit: str | None = None  # key of the file with the advantages of the turns; None without

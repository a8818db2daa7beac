"""Builds what jobs read: the finished rollouts of a group, the values of a step, the plan of its encoding.

For the run from its records, and for `headpond redo` from recorded results.
"""

from collections.abc import Iterable, Sequence

from headpond.batches import BatchPlan, BatchRollout
from headpond.config import RunConfig
from headpond.ledger.states import RolloutState
from headpond.orchestrator.ledger.rows import BatchRecord, GroupRecord, Value
from headpond.records.inputs import GroupInputs, StepValues
from headpond.records.rollout import RolloutResult
from headpond.store import BlobRef

NO_BLOB = BlobRef(key="none", size=0, checksum="")  # of rollouts without files: those of the no-op environment


def group_inputs(group: GroupRecord, policy_version: int) -> GroupInputs:
    """All generated rollouts: the reward of a dropped one still counts in the baseline."""
    finished = [(rollout.id, rollout.result) for rollout in group.rollouts if rollout.state is not RolloutState.DEAD]
    return GroupInputs(
        group=group.id,
        environment=group.environment,
        example=group.example,
        policy_version=policy_version,
        members={id: result for id, result in finished if result},
    )


def step_values(batch: BatchRecord, state: Value) -> StepValues:
    """What the batch phase of `batch` reads."""
    groups = {group.id: (group.id, group.environment, group.example) for group in batch.groups}
    rollouts = sorted(batch.rollouts(), key=lambda rollout: rollout.id)
    results = [rollout.result for rollout in rollouts if rollout.result]
    return values_of(
        [rollout.id for rollout in rollouts],
        [groups[rollout.group] for rollout in rollouts],
        results,
        values=[rollout.advantage or 0.0 for rollout in rollouts],
        credit=[result.credit for result in results],
        state=str(state) if state is not None else None,
    )


def batch_plan(config: RunConfig, batch: BatchRecord) -> BatchPlan:
    """What the encoding jobs of `batch` read, and what its manifest names."""
    environments = {group.id: group.environment for group in batch.groups}
    rollouts = [
        batch_rollout(
            rollout.id, rollout.group, environments[rollout.group], rollout.result,
            advantage=batch.advantages[rollout.id], masked=rollout.masked, credit=rollout.result.credit,
        )
        for rollout in batch.rollouts() if rollout.result
    ]  # fmt: skip
    return plan_of(config, batch.step, rollouts, batch.credit)


def values_of(
    rollouts: Sequence[str],
    groups: Sequence[tuple[str, str, int]],
    results: Sequence[RolloutResult],
    *,
    values: Sequence[float],
    credit: Sequence[str | None],
    state: str | None,
) -> StepValues:
    """Build what a batch phase reads. `groups`: (id, environment, example) of each rollout; `values`: by the estimator.

    240 kB for 4,096 rollouts, in the order of their ids.
    """
    return StepValues(
        rollouts=list(rollouts),
        groups=[group for group, _, _ in groups],
        environments=[environment for _, environment, _ in groups],
        examples=[example for _, _, example in groups],
        values=list(values),
        rewards=[result.reward for result in results],
        named_rewards=[result.rewards for result in results],
        failed=[result.policy_error is not None for result in results],
        agents=[result.agents for result in results],
        agent_rewards=[result.agent_rewards for result in results],
        credit=list(credit),
        completion_tokens=[result.completion_tokens for result in results],
        state=state,
    )


def plan_of(config: RunConfig, step: int, rollouts: Iterable[BatchRollout], credit: str | None) -> BatchPlan:
    """Build the plan of a step, which its encoding jobs read and its manifest names."""
    return BatchPlan(
        step=step,
        rules=config.batch.packing_rules(),
        rollouts=tuple(rollouts),
        normalise=config.batch.normalise,
        logprobs_mode=config.engine.logprobs_mode,
        fields=config.batch.declared_fields,
        format=config.batch.format,
        credit=credit,
    )


def batch_rollout(
    rollout: str,
    group: str,
    environment: str,
    result: RolloutResult,
    *,
    advantage: float,
    masked: bool,
    credit: str | None,
) -> BatchRollout:
    return BatchRollout(
        rollout=rollout,
        group=group,
        env=environment,
        reward=result.reward,
        advantage=advantage,
        version_first=result.version_first,
        version_last=result.version_last,
        sample_lengths=result.sample_lengths,
        columns=result.columns or NO_BLOB,
        experts=result.experts,
        masked=masked,
        inexact_tokens=result.inexact_tokens,
        credit=credit,
    )

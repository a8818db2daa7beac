"""The compute stages: from a job's input and the store to the job's result. `tasks/jobs.py` binds them to queues.

In the order of a group: token filters and the fsync of its blobs; the estimator's group phase and the group filters,
which need its shaped rewards; of a step, the estimator's batch phase and the encoding of one rank. Last, draws of
samplers.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from headpond.advantages import BatchValues, Floats, GroupValues, TurnValues, batch_phase, group_phase, resolve
from headpond.batches import BatchPlan, BatchRollout
from headpond.batches.credit import Credit, StepCredit, credit_key, read_credit, write_credit
from headpond.batches.writer import encode_rank
from headpond.config import RunConfig
from headpond.config.engine import AbsentRoutes
from headpond.errors import BlobCorrupt, BlobMissing, StageError
from headpond.filters import (
    GroupRewards,
    RolloutTokens,
    Verdict,
    count_matches,
    group_filters,
    judge,
    judge_group,
    rollout_filters,
)
from headpond.messages import (
    UNREADABLE_LIMIT,
    AdvantageResult,
    DrawInputs,
    DrawResult,
    EncodeResult,
    FilterResult,
    GroupInputs,
    RolloutResult,
    StepAdvantages,
    StepValues,
)
from headpond.sampling import draw
from headpond.store import Store
from headpond.store.columns import read_columns

logger = logging.getLogger("headpond.stages")

Number = TypeVar("Number", int, float)
NO_CREDIT = Credit(values=(), rewards=(), agents=(), tokens=())
NO_TURNS = TurnValues(rewards=np.empty(0), agents=(), tokens=np.empty(0, np.int64))


def filter_group(store: Store, group: GroupInputs, config: RunConfig, *, retried: bool = False) -> FilterResult:
    filters = rollout_filters(config.filters, vocab_size=config.vocab_size)
    drops_absent = config.engine.absent_routes is AbsentRoutes.DROP
    verdicts, dropped = dict[str, Verdict](), dict[str, str]()
    for member in group.members:
        if member.result.columns is None:
            # It failed before the engine's first response: its reward counts in the baseline, and there are no tokens.
            dropped[member.rollout] = "nothing_to_train"
            continue
        try:
            _make_durable(store, member.result, verify=retried)
            verdicts[member.rollout] = judge(read_tokens(store, member.result, group.policy_version), filters)
            if drops_absent and member.result.metrics.get("absent_routes"):
                dropped[member.rollout] = "absent_routes"
        except (BlobMissing, BlobCorrupt) as error:
            logger.error("action=blob_corrupt rollout=%s %s", member.rollout, error)
            dropped[member.rollout] = "blob_corrupt"
    by_filter = {rollout: reason for rollout, verdict in verdicts.items() if (reason := verdict.drop_reason)}
    return FilterResult(
        dropped=by_filter | dropped,
        masked=tuple(rollout for rollout, verdict in verdicts.items() if verdict.masked),
        matched=dict(count_matches(verdicts.values())),
    )


def _make_durable(store: Store, result: RolloutResult, *, verify: bool) -> None:
    """fsync, off the step boundary, before the columns are verified. The reader verifies the experts; they are read
    here only with `verify`: after an fsync that failed, bytes may be lost although the next one succeeds."""
    store.sync(result.keys)
    if result.experts and verify:
        store.open(result.experts)
    elif result.experts:
        store.require(result.experts)


def read_tokens(store: Store, result: RolloutResult, policy_version: int) -> RolloutTokens:
    """What token filters judge, of a rollout that has columns."""
    assert result.columns is not None
    columns = read_columns(store, result.columns)
    return RolloutTokens(
        input_ids=columns.input_ids,
        loss_mask=columns.loss_mask,
        logprobs=columns.logprobs,
        sample_offsets=columns.sample_offsets,
        truncated=columns.truncated,
        overlong_prompt=columns.overlong_prompt,
        version_first=result.version_first,
        version_now=policy_version,
        finish_reason=columns.turns.last_finish_reason,
    )


def estimate_group(store: Store, group: GroupInputs, config: RunConfig, *, execution: str) -> AdvantageResult:
    """An estimator that answers per turn reads the table of turns of each rollout and writes a file beside it."""
    recipe = resolve(config.advantages, group_size=config.rollouts.group_size)
    results = [member.result for member in group.members]
    rewards = np.array([result.reward for result in results], np.float64)
    values = GroupValues(
        rewards=rewards,
        completion_tokens=np.array([result.completion_tokens for result in results], np.int64),
        tool_tokens=np.array([result.tool_tokens for result in results], np.int64),
        input_tokens=np.array([result.prompt_tokens for result in results], np.int64),
        turns=np.array([result.turns for result in results], np.int64),
        named_rewards=_named_rewards(
            [result.rewards for result in results], rewards, [result.policy_error is not None for result in results]
        ),
        agents=_named([result.agents for result in results]),
        agent_rewards=_named([result.agent_rewards for result in results]),
        by_turn=tuple(_turns(store, result) for result in results) if recipe.estimator.per_turn else (),
        environment=group.environment,
        example=group.example,
    )
    advantages = group_phase(values, recipe)
    filters = group_filters(config.filters, needs_variance=recipe.needs_variance)
    judged = GroupRewards(rewards=rewards, shaped=advantages.shaped, judged=advantages.judged)
    verdict = judge_group(judged, filters)
    if advantages.by_turn is not None and not verdict.drop_reason:
        for result, turns, of_turns in zip(results, values.by_turn, advantages.by_turn, strict=True):
            if result.columns:
                write_credit(store, credit_key(result.columns.key, execution), _credit(turns, of_turns))
    rollouts = (member.rollout for member in group.members)
    return AdvantageResult(
        advantages=dict(zip(rollouts, advantages.values.tolist(), strict=True)),
        dropped=verdict.drop_reason,
        masked=verdict.masked,
        credit=execution if advantages.by_turn is not None else None,
    )


def estimate_step(store: Store, step: StepValues, config: RunConfig, *, credit: str) -> StepAdvantages:
    """`credit` is the key of the file for an estimator that answers per turn."""
    recipe = resolve(config.advantages, group_size=config.rollouts.group_size)
    rewards = np.array(step.rewards, np.float64)
    values = BatchValues(
        values=np.array(step.values, np.float64),
        sampled_tokens=np.array(step.completion_tokens, np.int64),
        rewards=rewards,
        named_rewards=_named_rewards(step.named_rewards, rewards, step.failed),
        agents=_named(step.agents),
        agent_rewards=_named(step.agent_rewards),
        groups=tuple(step.groups),
        environments=tuple(step.environments),
        examples=tuple(step.examples),
    )
    if recipe.estimator.per_turn:
        given = [read_credit(store, key) if key else NO_CREDIT for key in step.credit]
        values = replace(
            values,
            by_turn=tuple(map(_turns_of, given)),
            turn_values=tuple(np.array(each.values, np.float64) for each in given),
        )
    result = batch_phase(values, recipe, step.state)
    advantages = dict(zip(step.rollouts, result.values.tolist(), strict=True))
    if result.by_turn is None:
        return StepAdvantages(advantages=advantages, state=result.state)
    by_turn = tuple(tuple(each.tolist()) for each in result.by_turn)
    write_credit(store, credit, StepCredit(rollouts=tuple(step.rollouts), values=by_turn))
    return StepAdvantages(advantages=advantages, state=result.state, credit=credit)


def _named_rewards(named: Sequence[Mapping[str, float]], rewards: Floats, failed: Sequence[bool]) -> dict[str, Floats]:
    """A rollout whose policy failed has no parts: its reward stands for each."""
    missing = [float(reward) if fails else np.nan for reward, fails in zip(rewards, failed, strict=True)]
    names = dict.fromkeys(name for parts in named for name in parts)
    return {
        name: np.array([parts.get(name, other) for parts, other in zip(named, missing, strict=True)], np.float64)
        for name in names
    }


def _named(entries: Sequence[Mapping[str, Number]]) -> tuple[Mapping[str, Number], ...]:
    return tuple(entries) if any(entries) else ()


def _turns(store: Store, result: RolloutResult) -> TurnValues:
    """The filtering job has verified the columns."""
    if result.columns is None:
        return NO_TURNS
    turns = read_columns(store, result.columns, verify=False).turns
    return TurnValues(
        rewards=np.array(turns.reward),
        agents=tuple(turns.words["agent"][index] for index in turns.agent.tolist()),
        tokens=turns.end - turns.start,
    )


def _credit(turns: TurnValues, values: Floats) -> Credit:
    return Credit(
        values=tuple(values.tolist()),
        rewards=tuple(None if reward != reward else reward for reward in turns.rewards.tolist()),
        agents=turns.agents,
        tokens=tuple(turns.tokens.tolist()),
    )


def _turns_of(credit: Credit) -> TurnValues:
    rewards = [np.nan if reward is None else reward for reward in credit.rewards]
    return TurnValues(
        rewards=np.array(rewards, np.float64), agents=credit.agents, tokens=np.array(credit.tokens, np.int64)
    )


def encode(
    store: Store, plan: BatchPlan, *, data_rank: int, execution: str, rollouts_jsonl: bool = False
) -> EncodeResult:
    """One data rank of a step. If rollouts' columns cannot be read, the result names the rollouts, so that the step can
    be formed without them."""
    try:
        rank = encode_rank(store, plan, data_rank=data_rank, execution=execution, rollouts_jsonl=rollouts_jsonl)
        return EncodeResult(rank=rank)
    except (BlobMissing, BlobCorrupt):
        unreadable = [rollout.rollout for rollout in plan.rollouts if not _readable(store, rollout)]
        if not unreadable:
            raise
        return EncodeResult(unreadable=tuple(unreadable[:UNREADABLE_LIMIT]))


def _readable(store: Store, rollout: BatchRollout) -> bool:
    try:
        read_columns(store, rollout.columns)
        if rollout.credit:
            read_credit(store, rollout.credit)
    except (BlobMissing, BlobCorrupt):
        return False
    return True


def draw_examples(inputs: DrawInputs, config: RunConfig) -> DrawResult:
    """A sampler draws the next examples of an environment."""
    settings = config.environments.get(inputs.environment)
    if settings is None:
        raise StageError(f"this worker has no environment {inputs.environment!r}: add it to its configuration")
    drawn = draw(
        settings.sampler,
        settings.sampler_options,
        environment=inputs.environment,
        size=inputs.size,
        seed=inputs.seed,
        count=inputs.count,
        played=inputs.played,
        state=inputs.state,
    )
    return DrawResult(examples=tuple(drawn.examples), state=drawn.state)

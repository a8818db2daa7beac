"""Filter: a group's files are made durable, and the token filters judge its rollouts."""

import logging

from headpond.broker.queues import Queue
from headpond.config.engine import AbsentRoutes
from headpond.errors import BlobCorrupt, BlobMissing
from headpond.filters import RolloutTokens, Verdict, count_matches, judge, rollout_filters
from headpond.records.inputs import GroupInputs
from headpond.records.rollout import RolloutResult
from headpond.records.wire import Result
from headpond.store import Store
from headpond.store.columns import read_columns
from headpond.tasks import inputs
from headpond.tasks.stage import Call, PlanMessage, Stage, Subject

logger = logging.getLogger("headpond.stages")


class FilterResult(Result):
    dropped: dict[str, str] = {}  # rollout -> the reason that drops it
    masked: tuple[str, ...] = ()  # rollouts to deliver with loss mask 0
    matched: dict[str, int] = {}  # filter -> number of rollouts it matched, in any mode


def filter_group(call: Call[PlanMessage]) -> FilterResult:
    config, group = call.config, inputs.read(call.store, call.message.plan, GroupInputs)
    filters = rollout_filters(config.filters, vocab_size=config.vocab_size)
    drops_absent = config.engine.absent_routes is AbsentRoutes.DROP
    verdicts, dropped = dict[str, Verdict](), dict[str, str]()
    for rollout, result in group.members.items():
        if result.columns is None:
            # It failed before the engine's first response: its reward counts in the baseline, and there are no tokens.
            dropped[rollout] = "nothing_to_train"
            continue
        try:
            _make_durable(call.store, result, verify=call.message.attempt > 1)
            verdicts[rollout] = judge(read_tokens(call.store, result, group.policy_version), filters)
            if drops_absent and result.metrics.get("absent_routes"):
                dropped[rollout] = "absent_routes"
        except (BlobMissing, BlobCorrupt) as error:
            logger.error("action=blob_corrupt rollout=%s %s", rollout, error)
            dropped[rollout] = "blob_corrupt"
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
    """The input of token filters, from a rollout that has columns."""
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


STAGE = Stage(
    name="filter",
    queue=Queue.FILTERING,
    task="headpond.filtering.run",
    subject=Subject.GROUP,
    message=PlanMessage,
    result=FilterResult,
    body=filter_group,
    gate="filtering",
)

"""Groups in the states that tests need, moved there by the ledger's own methods, and an attendance without Redis."""

from typing import Any

from headpond.batches import EncodedRank
from headpond.config import RunConfig
from headpond.ledger.states import GroupState, JobState, Purpose, RolloutState
from headpond.orchestrator.examples.evaluation import Evaluations
from headpond.orchestrator.exchange.gates import Gates
from headpond.orchestrator.exchange.inputs import batch_plan
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import BatchRecord, GroupRecord
from headpond.orchestrator.pipeline import Pipeline
from headpond.orchestrator.replies import Replies
from headpond.orchestrator.workforce.attendance import Attendance
from headpond.records.rollout import RolloutResult
from headpond.records.wire import Result
from headpond.store import BlobRef
from headpond.tasks.stage import Outcome, Reply, all_stages


def configured(**settings: Any) -> RunConfig:
    """Two groups of four rollouts a step, three steps."""
    values: dict[str, Any] = {"steps": 3, "rollouts": {"group_size": 4}, "batch": {"size": 2}}
    for key, value in settings.items():
        values[key] = values.get(key, {}) | value if isinstance(value, dict) else value
    return RunConfig.model_validate({"environments": {"noop": {"use": "noop"}}} | values)


def planned(
    ledger: Ledger, size: int = 4, *, environment: str = "noop", purpose: Purpose = Purpose.TRAINING
) -> GroupRecord:
    return ledger.plan(environment=environment, example=ledger.state.groups_planned, size=size, purpose=purpose)


def submitted(
    ledger: Ledger, size: int = 4, *, environment: str = "noop", purpose: Purpose = Purpose.TRAINING
) -> GroupRecord:
    group = planned(ledger, size, environment=environment, purpose=purpose)
    for rollout in group.rollouts:
        ledger.submit(ledger.jobs[rollout.id])
    return group


def generated(ledger: Ledger, size: int = 4, *, environment: str = "noop", **result: Any) -> GroupRecord:
    """`result`: fields of every rollout's result."""
    group = submitted(ledger, size, environment=environment)
    for rollout in group.rollouts:
        ledger.end(ledger.jobs[rollout.id], JobState.SETTLED)
        ledger.generated(rollout, RolloutResult(reward=float(rollout.index), **result))
    return group


def admitted(ledger: Ledger, size: int = 4, *, environment: str = "noop", **result: Any) -> GroupRecord:
    group = generated(ledger, size, environment=environment, **result)
    for rollout in group.rollouts:
        rollout.advantage = rollout.index - 1.5
        ledger.move(rollout, RolloutState.ADMITTED)
    ledger.enter(group, GroupState.ADMITTED)
    return group


def encoded(config: RunConfig, batch: BatchRecord) -> list[EncodedRank]:
    """Results of the encoding jobs of `batch`: two samples and 20 loss tokens per rank; no file is written."""
    plan = batch_plan(config, batch)
    return [
        EncodedRank(
            plan=plan.digest,
            data_rank=data_rank,
            file=BlobRef(key=f"{plan.directory}/rank_{data_rank}", size=0, checksum=""),
            micro_batches=1,
            tokens=32,
            samples=2,
            loss_tokens=20,
        )
        for data_rank in range(plan.rules.data_ranks)
    ]


def pipeline_of(
    config: RunConfig, ledger: Ledger, gates: Gates | None = None, *, run: str = "run", batch_phase: bool = False
) -> Pipeline:
    return Pipeline(config, run, ledger, gates or Gates(), Evaluations(config, ledger), batch_phase=batch_phase)


def replies_of(config: RunConfig, ledger: Ledger, pipeline: Pipeline | None = None) -> Replies:
    """Without workers: every reply is used."""
    return Replies(config, ledger, pipeline or pipeline_of(config, ledger), unattended(config))


def reply_to(job: str, *, result: Result | None = None, **fields: Any) -> Reply:
    """A reply with `result`, of the stage that has such results."""
    stages = {stage.result: stage.name for stage in all_stages().values()}
    values: dict[str, Any] = {
        "run": "run", "attempt": 1, "execution": "x", "worker": "w", "node": "n", "settings": "",
        "outcome": Outcome.DONE,
    } | fields  # fmt: skip
    return Reply(stage=stages.get(type(result), "play"), job=job, result=result, **values)  # type: ignore[arg-type]


ANY_SEQUENCE = 1 << 62


def unattended(config: RunConfig) -> Attendance:
    return Attendance(config, Broker("redis://unused/0"), first_sequence=ANY_SEQUENCE)

"""No-op stages for tests and benchmarks (`headpond.config.test_hooks`), with configured durations and faults.

Pure functions of the job and the settings, in place of the real stages.
"""

import asyncio
import time

import xxhash

from headpond.batches import BatchPlan, EncodedRank
from headpond.config.test_hooks import Noop
from headpond.errors import EngineUnreachable, InfrastructureFailure
from headpond.messages import (
    AdvantageJob,
    AdvantageResult,
    EncodeJob,
    EncodeResult,
    FilterJob,
    FilterResult,
    GroupInputs,
    Job,
    RolloutJob,
    RolloutResult,
)
from headpond.store import BlobRef

HOLD_POLL_S = 0.5  # 1,000 held rollouts look for the file 2,000 times a second


async def rollout(job: RolloutJob, noop: Noop) -> RolloutResult:
    while noop.wedge_while and noop.wedge_while.exists():
        time.sleep(0.05)  # noqa: ASYNC251  the purpose is to block the loop
    if noop.engine_down_while and noop.engine_down_while.exists():
        raise EngineUnreachable("the engine is down by configuration (noop.engine_down_while)")
    _fail_sometimes(job, noop)
    if noop.rollout_s:
        await asyncio.sleep(noop.rollout_s)
    while noop.hold_while and noop.hold_while.exists():
        await asyncio.sleep(HOLD_POLL_S)
    failed = chance(job.seed, job.job, "policy") < noop.policy_error_rate
    return RolloutResult(
        reward=0.0 if failed else round(chance(job.seed, job.job, "reward"), 6),
        policy_error="noop" if failed else None,
        turns=1,
        completion_tokens=1 + int(100 * chance(job.seed, job.job, "tokens")),
    )


def filtering(job: FilterJob, group: GroupInputs, noop: Noop) -> FilterResult:
    work(job, noop)
    dropped = {m.rollout: "noop" for m in group.members if chance(0, m.rollout, "drop") < noop.drop_rate}
    return FilterResult(dropped=dropped)


def advantages(job: AdvantageJob, group: GroupInputs, noop: Noop) -> AdvantageResult:
    work(job, noop)
    mean = sum(member.result.reward for member in group.members) / len(group.members)
    return AdvantageResult(advantages={member.rollout: member.result.reward - mean for member in group.members})


def encoding(job: EncodeJob, plan: BatchPlan, noop: Noop, execution: str) -> EncodeResult:
    work(job, noop)
    mine = plan.rollouts[job.data_rank :: plan.rules.data_ranks]
    rank = EncodedRank(
        plan=plan.digest,
        data_rank=job.data_rank,
        file=BlobRef(key=f"{plan.directory}/rank_{job.data_rank:02d}.{execution}.none", size=0, checksum=""),
        micro_batches=0,
        tokens=0,
        samples=len(mine),
        loss_tokens=0,
    )
    return EncodeResult(rank=rank)


def chance(seed: int, *parts: object) -> float:
    """A number in [0, 1), derived from a hash of the arguments."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode(), seed=seed & 0xFFFF_FFFF) / 2**64


def work(job: Job, noop: Noop) -> None:
    _fail_sometimes(job, noop)
    if noop.stage_s:
        time.sleep(noop.stage_s)


def _fail_sometimes(job: Job, noop: Noop) -> None:
    if chance(0, job.run, job.job, job.attempt) < noop.failure_rate:
        raise InfrastructureFailure(f"attempt {job.attempt} fails by configuration (noop.failure_rate)")

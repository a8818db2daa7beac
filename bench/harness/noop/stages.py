"""No-op bodies of stages, with the durations and faults that `NOOP_*` variables set.

`install` puts them into the registry of stages. They play environments with `use = "noop"`: each is a pure function of
the job and the settings. All other environments get the real body.
"""

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import BaseModel, Field, PositiveInt

from headpond.batches import BatchPlan, EncodedRank
from headpond.config import RunConfig
from headpond.config.engine import EnvironmentCode
from headpond.declarations.sections import Fraction
from headpond.environments.loading import LoadedEnvironment, load_environments
from headpond.errors import EngineUnreachable, InfrastructureFailure
from headpond.records.inputs import GroupInputs, StepValues
from headpond.records.rollout import RolloutResult
from headpond.store import BlobRef
from headpond.tasks import inputs, player
from headpond.tasks.stage import Body, Call, Message, all_stages
from headpond.tasks.stages.advantage import AdvantageResult
from headpond.tasks.stages.batch_phase import BatchPhaseResult, estimate
from headpond.tasks.stages.encode import EncodeResult
from headpond.tasks.stages.filter import FilterResult
from headpond.tasks.stages.survey import SurveyResult

NOOP = "noop"
PREFIX = "NOOP_"
HOLD_POLL_S = 0.5  # 1,000 held rollouts look for the file 2,000 times a second


class Noop(BaseModel, extra="forbid"):
    """Each field is read from a variable: `NOOP_ROLLOUT_S=0.5`."""

    examples: PositiveInt = 1_000_000
    """Examples of a no-op environment."""
    rollout_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that a rollout takes."""
    stage_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that a filtering, advantage or encoding job takes."""
    failure_rate: Fraction = 0.0
    """Fraction of attempts, of any job, that fail with an infrastructure failure."""
    policy_error_rate: Fraction = 0.0
    """Fraction of rollouts that end with a policy error."""
    drop_rate: Fraction = 0.0
    """Fraction of rollouts that the filtering job drops."""
    engine_down_while: Path | None = None
    """The engine is unreachable while this file exists."""
    hold_while: Path | None = None
    """Rollouts do not end while this file exists."""
    wedge_while: Path | None = None
    """Rollouts block the worker's event loop while this file exists."""


NoopBody = Callable[[Call[Any], Noop], Any]


def install(environ: Mapping[str, str] = os.environ) -> None:
    """Call once per worker process, before the first job."""
    noop = noop_settings(environ)
    for name, (environments, body) in BODIES.items():
        stage = all_stages()[name]
        all_stages()[name] = dataclasses.replace(stage, body=_or_real(stage.body, environments, body, noop))
    player.load_environments = _load_others


def noop_settings(environ: Mapping[str, str]) -> Noop:
    found = {name.removeprefix(PREFIX).lower(): value for name, value in environ.items() if name.startswith(PREFIX)}
    return Noop.model_validate(found)


def plays_noops(config: RunConfig, environments: Iterable[str]) -> bool:
    """Whether `environments` are all no-ops."""
    known = {**config.environments, **config.evaluation}
    return all(name in known and known[name].use == NOOP for name in environments)


def _or_real(
    real: Body[Any, Any], environments: Callable[[Call[Any]], Iterable[str]], body: NoopBody, noop: Noop
) -> Body[Any, Any]:
    def chosen(call: Call[Any]) -> Any:
        return body(call, noop) if plays_noops(call.config, environments(call)) else real(call)

    return chosen


def _load_others(settings: Mapping[str, EnvironmentCode], *place: Any, **section: Any) -> dict[str, LoadedEnvironment]:
    """The worker cannot load a no-op environment: it has no code."""
    others = {name: each for name, each in settings.items() if each.use != NOOP}
    return load_environments(others, *place, **section) if others or not settings else {}


def _environment(call: Call[Any]) -> Iterable[str]:
    return [call.message.environment]


def _of_group(call: Call[Any]) -> Iterable[str]:
    return [_group(call).environment]


def _of_step(call: Call[Any]) -> Iterable[str]:
    return set(inputs.read(call.store, call.message.plan, StepValues).environments)


def _of_plan(call: Call[Any]) -> Iterable[str]:
    return _plan(call).envs


def _group(call: Call[Any]) -> GroupInputs:
    return inputs.read(call.store, call.message.plan, GroupInputs)


def _plan(call: Call[Any]) -> BatchPlan:
    return inputs.read(call.store, call.message.plan, BatchPlan)


async def survey(call: Call[Any], noop: Noop) -> SurveyResult:
    return SurveyResult(examples=noop.examples, scores_groups=False)


async def play(call: Call[Any], noop: Noop) -> RolloutResult:
    job = call.message
    while noop.wedge_while and noop.wedge_while.exists():
        time.sleep(0.05)  # noqa: ASYNC251  the purpose is to block the loop
    if noop.engine_down_while and noop.engine_down_while.exists():
        raise EngineUnreachable("the engine is down by configuration (NOOP_ENGINE_DOWN_WHILE)")
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


def filtering(call: Call[Any], noop: Noop) -> FilterResult:
    work(call.message, noop)
    dropped = {id: "noop" for id in _group(call).members if chance(0, id, "drop") < noop.drop_rate}
    return FilterResult(dropped=dropped)


def advantages(call: Call[Any], noop: Noop) -> AdvantageResult:
    work(call.message, noop)
    members = _group(call).members
    mean = sum(result.reward for result in members.values()) / len(members)
    return AdvantageResult(advantages={id: result.reward - mean for id, result in members.items()})


def batch_phase(call: Call[Any], noop: Noop) -> BatchPhaseResult:
    work(call.message, noop)
    return estimate(call)


def encoding(call: Call[Any], noop: Noop) -> EncodeResult:
    plan, job = _plan(call), call.message
    work(job, noop)
    mine = plan.rollouts[job.data_rank :: plan.rules.data_ranks]
    rank = EncodedRank(
        plan=plan.digest,
        data_rank=job.data_rank,
        file=BlobRef(key=f"{plan.directory}/rank_{job.data_rank:02d}.{call.execution}.none", size=0, checksum=""),
        micro_batches=0,
        tokens=0,
        samples=len(mine),
        loss_tokens=0,
    )
    return EncodeResult(rank=rank)


def chance(seed: int, *parts: object) -> float:
    """A number in [0, 1), derived from a hash of the arguments."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode(), seed=seed & 0xFFFF_FFFF) / 2**64


def work(job: Message, noop: Noop) -> None:
    _fail_sometimes(job, noop)
    if noop.stage_s:
        time.sleep(noop.stage_s)


def _fail_sometimes(job: Message, noop: Noop) -> None:
    if chance(0, job.run, job.job, job.attempt) < noop.failure_rate:
        raise InfrastructureFailure(f"attempt {job.attempt} fails by configuration (NOOP_FAILURE_RATE)")


BODIES: dict[str, tuple[Callable[[Call[Any]], Iterable[str]], NoopBody]] = {
    "survey": (_environment, survey),
    "play": (_environment, play),
    "filter": (_of_group, filtering),
    "advantage": (_of_group, advantages),
    "batch_phase": (_of_step, batch_phase),
    "encode": (_of_plan, encoding),
}
"""Stage -> the environments of a job, and its body if all of them are no-ops."""

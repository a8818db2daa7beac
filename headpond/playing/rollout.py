"""One rollout from its example to its files, and the scores of a finished group.

A rollout that fails because of the policy is a result; every other failure is raised. No files
of a rollout remain in the store unless a result is returned.
"""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from headpond import ids
from headpond.config import RunConfig
from headpond.config.engine import Policy
from headpond.config.sessions import Sessions
from headpond.engines.dialects import Dialect, dialect_of
from headpond.engines.http.client import EngineClient
from headpond.engines.replicas.selection import NO_ORDERS, Orders
from headpond.environments.loading import LoadedEnvironment
from headpond.environments.protocol import AgentPolicy, PlayedRollout, Score, ScoresGroups, checked_score
from headpond.errors import (
    BlobError,
    InfrastructureFailure,
    NotFound,
    NothingToTrain,
    PolicyFailure,
    StageError,
    error_boundary,
    in_own_task,
    shortened,
)
from headpond.event_loop.cancellation import opening, run_to_completion
from headpond.event_loop.offload import in_file_thread, in_io_thread
from headpond.fields import FieldValues, TrainerField
from headpond.playing.agent_sessions import SessionServers
from headpond.playing.policy import RecordedPolicy
from headpond.playing.posted_scores import completed
from headpond.recording import Echo, Mode, Session, SessionSettings
from headpond.records.rollout import POLICY_ERROR_CHARACTERS, Recorded, RolloutResult
from headpond.renderers import PooledRenderer
from headpond.spans import TimedSpan, collected, timed
from headpond.store import Store
from headpond.store.columns import read_columns

logger = logging.getLogger("headpond.rollout")


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Identity of one execution of a rollout."""

    run: str
    rollout: str
    attempt: int
    execution: str
    seed: int
    # Time limit. The rollout then ends with the turns that it has, as a failure of the
    # policy.
    timeout_s: float
    orders: Orders = NO_ORDERS  # The run's requirements on the engine's replicas.

    @property
    def key(self) -> str:
        """Directory of the rollout's files in the store. Only this execution uses it."""
        return ids.execution_directory(self.run, self.rollout, self.attempt, self.execution)


@dataclass(frozen=True, kw_only=True)
class PlayResources:
    """Resources and settings that the rollouts of a process share."""

    client: EngineClient
    store: Store
    settings: Policy
    dialect: Dialect
    # Session servers for external agents; None if none is configured.
    sessions: SessionServers | None = None
    # Settings of `[sessions]` that apply in this process too: `echo`, `concurrency`,
    # `when_busy`.
    recording: Sessions = field(default_factory=Sessions)
    fields: tuple[TrainerField, ...] = ()  # Declared fields for the trainer.
    trained: bool = True  # True if a field without a value and a default is an error.


async def play(
    resources: PlayResources, environment: LoadedEnvironment, example: int, attempt: Attempt
) -> RolloutResult:
    """Play one rollout, through a session server if the environment runs an external agent."""
    play_example = _play_agent if environment.external_agent else _play_here
    try:
        with collected() as spans:
            return await play_example(resources, environment, example, attempt, spans)
    except BaseException:
        await run_to_completion(asyncio.create_task(_sweep(resources.store, attempt.key)))
        raise


async def _play_here(
    resources: PlayResources, environment: LoadedEnvironment, example: int, attempt: Attempt, spans: Sequence[TimedSpan]
) -> RolloutResult:
    async with _recording(resources, attempt) as session:
        policy = RecordedPolicy(
            resources.client, session, resources.settings, resources.dialect, seed=attempt.seed, fields=resources.fields
        )
        try:
            result = await _play_and_seal(resources, environment, example, attempt, session, policy, spans)
        except BaseException as error:
            policy.discarded(error)
            raise
        return result.model_copy(update={"replica_uses": policy.usage.by_replica})


async def _play_and_seal(
    resources: PlayResources,
    environment: LoadedEnvironment,
    example: int,
    attempt: Attempt,
    session: Session,
    policy: RecordedPolicy,
    spans: Sequence[TimedSpan],
) -> RolloutResult:
    """Play one rollout and seal its files. If the policy fails before the first turn, the result
    has no files. It counts in the group's baseline: playing it again would select among
    rollouts."""
    score, error = await _play_environment(environment, example, policy, resources.settings, attempt.timeout_s)
    assert score is not None, "only an external agent's score can be posted"
    if error and not session.turns:
        await session.close()
        return RolloutResult(reward=score.reward, policy_error=shortened(error, POLICY_ERROR_CHARACTERS))
    required = error is None and resources.trained
    fields = FieldValues(
        declared=resources.fields,
        score=score.columns,
        turns=policy.turn_fields,
        required=required,
        turn_rewards=score.turn_rewards,
    )
    with error_boundary(StageError, f"environment {environment.name!r} left its rollout unfinished"):
        version_after = resources.client.replicas.after
        sealed = await session.seal(error=error or "", fields=fields, version_after=version_after, spans=spans)
    metrics = {
        "engine_s": policy.engine_s,
        "engine_failures": float(policy.failures),
        "engine_aborts": float(policy.aborts),
    }
    return _result(environment, score, error, sealed, metrics)


async def _play_agent(
    resources: PlayResources, environment: LoadedEnvironment, example: int, attempt: Attempt, spans: Sequence[TimedSpan]
) -> RolloutResult:
    """Play one rollout with an external agent. An agent that sent no request has a result
    without files, whatever its score."""
    assert resources.sessions is not None, "checked when the environments were loaded"
    sampling = (
        resources.settings.sampling.model_dump(exclude={"more"}, exclude_none=True) | resources.settings.sampling.more
    )
    request = {
        "run": attempt.run,
        "rollout": attempt.rollout,
        "attempt": attempt.attempt,
        "execution": attempt.execution,
        "sampling": sampling,
        "policy_version": attempt.orders.version,
        "least_version": attempt.orders.least_version,
        "abandoned_versions": attempt.orders.abandoned,
        "sequence": attempt.orders.sequence,
    }
    async with resources.sessions.session(request) as session:
        policy = AgentPolicy(
            base_url=session.base_url,
            api_key=session.secret,
            model=resources.client.settings.model,
            control_key=session.control_secret,
        )
        score, error = await _play_environment(environment, example, policy, resources.settings, attempt.timeout_s)
        if score and score.columns:
            raise StageError(f"environment {environment.name!r}: Score.columns is not supported with an external agent")
        try:
            sealed, posted = await session.seal(error or "", score.turn_rewards if score else None, spans)
        except NothingToTrain as nothing:
            policy_error = shortened(error or str(nothing), POLICY_ERROR_CHARACTERS)
            reward = score.reward if score else resources.settings.policy_error_reward
            return RolloutResult(reward=reward, policy_error=policy_error)
        with error_boundary(StageError, f"environment {environment.name!r} has no score at example {example}"):
            score = completed(score, posted)
        return _result(environment, score, error, sealed, {})


async def score_group(
    store: Store, environment: LoadedEnvironment, example: int, members: Sequence[RolloutResult]
) -> list[Score]:
    """Score a group's rollouts together, in their order, if the environment has `score_group`."""
    rollouts = [await in_file_thread(_read_played, store, member) for member in members]
    label = f"environment {environment.name!r} could not score a group of example {example}"
    scorer = environment.environment
    if not isinstance(scorer, ScoresGroups):
        raise StageError(f"{label}: it has no score_group")

    async def score() -> list[Score]:
        scored = scorer.score_group(environment.example(example), rollouts)
        scores = await scored if inspect.isawaitable(scored) else scored
        if len(scores) != len(members):
            raise StageError(f"{label}: {len(scores)} scores for {len(members)} rollouts")
        checked = [checked_score(score) for score in scores]
        for name in ("columns", "turn_rewards", "agent_rewards"):
            if any(getattr(score, name) for score in checked):
                raise StageError(f"{label}: Score.{name} is not supported in score_group: return it from rollout")
        return checked

    return await in_own_task(StageError, label, score)


def _recording(resources: PlayResources, attempt: Attempt) -> contextlib.AbstractAsyncContextManager[Session]:
    """Open a session for one rollout, and close it if the rollout fails."""
    engine = resources.client.settings
    settings = SessionSettings(
        session=attempt.execution,
        key=attempt.key,
        rollout=attempt.rollout,
        attempt=attempt.attempt,
        mode=Mode.LINEAR if resources.dialect.renderer else Mode.OPEN,
        echo=Echo(resources.recording.echo),
        concurrency=resources.recording.concurrency,
        queue=resources.recording.when_busy == "queue",
        max_seq_len=resources.settings.max_seq_len,
        max_samples=resources.settings.max_samples,
        logprobs_mode=engine.logprobs_mode,
    )
    return opening(Session.start(resources.store, settings, route_format=engine.route_format), _close)


async def _close(session: Session) -> None:
    # The session may be closed already, and `_sweep` removes the files of a failed rollout.
    with contextlib.suppress(NotFound, OSError, BlobError):
        if not session.sealed:
            await session.close()


async def _sweep(store: Store, key: str) -> None:
    """Remove the files of a failed rollout. Failures are only logged: they must not replace the
    rollout's own error. The orchestrator's sweep removes leftovers."""
    try:
        await in_file_thread(store.sweep, key, named=())
    except (OSError, BlobError) as error:
        logger.warning("action=not_discarded key=%s error=%r", key, error)


async def _play_environment(
    environment: LoadedEnvironment,
    example: int,
    policy: RecordedPolicy | AgentPolicy,
    settings: Policy,
    timeout_s: float,
) -> tuple[Score | None, str | None]:
    """Return the score, and the policy's failure if the environment did not score it itself. The
    score is None if an external agent's environment returns None: the session then has it."""
    label = f"environment {environment.name!r} failed at example {example}"

    async def play() -> Score | None:
        returned = await environment.environment.rollout(environment.example(example), policy)
        if returned is None and isinstance(policy, AgentPolicy):
            return None
        return checked_score(returned)

    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            with timed("rollout"):
                return await in_own_task(StageError, label, play), None
    except PolicyFailure as failure:
        error = str(failure)
    except (TimeoutError, asyncio.CancelledError):
        if not limit.expired():  # The worker cancelled it.
            raise
        # The environment may have ignored the time-out until it was cancelled: its rollout was too
        # long all the same.
        error = f"timeout: the rollout took longer than {timeout_s:g} s"
    return Score(reward=settings.policy_error_reward), error


def _result(
    environment: LoadedEnvironment, score: Score, error: str | None, recorded: Recorded, metrics: Mapping[str, float]
) -> RolloutResult:
    metrics = {**recorded.metrics, **metrics}
    if reserved := sorted(metrics.keys() & score.metrics.keys()):
        raise StageError(
            f"environment {environment.name!r} returned a metric {', '.join(reserved)}, which Headpond reports itself: "
            "rename it in Score.metrics"
        )
    values = {
        "reward": score.reward,
        "rewards": dict(score.rewards),
        "agent_rewards": dict(score.agent_rewards),
        "policy_error": shortened(error, POLICY_ERROR_CHARACTERS) if error else None,
        # Six digits limit a reply's size.
        "metrics": {name: float(f"{value:.6g}") for name, value in {**score.metrics, **metrics}.items()},
    }
    return RolloutResult.model_validate({**dict(recorded), **values})


def _read_played(store: Store, member: RolloutResult) -> PlayedRollout:
    conversations = orjson.loads(read_columns(store, member.columns).conversation.tobytes()) if member.columns else [[]]
    return PlayedRollout(
        score=Score(reward=member.reward, rewards=member.rewards, metrics=member.metrics),
        error=member.policy_error,
        turns=member.turns,
        completion_tokens=member.completion_tokens,
        conversations=conversations,
    )


async def open_dialect(config: RunConfig) -> Dialect:
    """Open the engine's dialect and build its renderer before the first rollout."""
    settings, place = config.policy.renderer, config.place_of("engine", "dialect")
    if settings is None:
        return await in_io_thread(dialect_of, config.engine, place=place)
    renderer = PooledRenderer.of(settings, config.engine.model)
    dialect = await in_io_thread(dialect_of, config.engine, renderer=renderer, place=place)
    try:
        await renderer.pool()
    except InfrastructureFailure as error:
        logger.warning("action=not_warmed_up error=%s: the first rollout will retry", error)
    return dialect

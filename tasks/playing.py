"""What a rollout worker does with a job: the environments are the worker's own, a message only names one."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from penstock import plans
from penstock.blobs import Store
from penstock.config import RunConfig
from penstock.environments.loading import LoadedEnvironment, load_environments
from penstock.errors import ConfigError, StageError
from penstock.messages import RolloutJob, RolloutResult, ScoreJob, ScoreResult, SurveyJob, SurveyResult
from penstock.offload import in_io_thread
from penstock.policy import Dialect, EngineClient
from penstock.rollout import Attempt, RolloutStage, play, score_group
from tasks import noop


class Player:
    """Made once per process; `ready` opens what all its rollouts share."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._environments: dict[str, LoadedEnvironment] = {}
        self._broken: str | None = None
        self._stage: RolloutStage | None = None

    @asynccontextmanager
    async def ready(self) -> AsyncGenerator["Player"]:
        real = {name: each for name, each in self._config.environments.items() if each.use != "noop"}
        try:
            self._environments = await in_io_thread(load_environments, real)  # of none, the built-ins
        except ConfigError as error:
            self._broken = str(error)  # every job says so: the orchestrator stops with it, the worker stays
        async with EngineClient.open(self._config.engine) as client:
            self._stage = RolloutStage(
                client=client,
                store=Store(self._config.store_dir),
                settings=self._config.policy,
                dialect=Dialect(self._config.engine),
            )
            yield self

    async def play(self, job: RolloutJob, execution: str) -> RolloutResult:
        if self._is_noop(job.environment):
            return await noop.rollout(job, self._config.noop)
        assert self._stage is not None, "it is ready before it plays"
        self._stage.client.replicas.announce(job.policy_version)
        attempt = Attempt(
            run=job.run,
            rollout=job.job,
            attempt=job.attempt,
            execution=execution,
            seed=job.seed,
            timeout_s=job.timeout_s,
        )
        return await play(self._stage, self._environments[job.environment], job.example, attempt)

    async def score(self, job: ScoreJob) -> ScoreResult:
        assert not self._is_noop(job.environment), "a noop's groups are not scored"
        plan = await in_io_thread(plans.read_group, self._config.store_dir, job.plan)
        results = [member.result for member in plan.members]
        store = Store(self._config.store_dir)
        scores = await score_group(store, self._environments[job.environment], plan.example, results)
        names = (member.rollout for member in plan.members)
        return ScoreResult(rewards={name: score.reward for name, score in zip(names, scores, strict=True)})

    async def survey(self, job: SurveyJob) -> SurveyResult:
        if self._is_noop(job.environment):
            return SurveyResult(examples=noop.EXAMPLES, scores_groups=False)
        environment = self._environments[job.environment]
        return SurveyResult(examples=environment.size, scores_groups=environment.scores_groups)

    def _is_noop(self, name: str) -> bool:
        if noop.plays(name, self._config):
            return True
        if self._broken is not None:
            raise StageError(f"the worker could not load its environments: {self._broken}")
        if name not in self._environments:
            known = ", ".join(sorted(self._environments.keys() | self._config.environments.keys()))
            raise StageError(f"this worker has no environment {name!r}, only {known}: add it to its configuration")
        return False

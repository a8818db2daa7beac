"""What a rollout worker does with a job: the environment is the worker's own, a message only names it."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from penstock.config import RunConfig
from penstock.errors import StageError
from penstock.messages import RolloutJob, RolloutResult, ScoreJob, ScoreResult, SurveyJob, SurveyResult
from tasks import noop


class Player:
    def __init__(self, config: RunConfig) -> None:
        self._config = config

    @asynccontextmanager
    async def ready(self) -> AsyncGenerator["Player"]:
        """What is shared by all rollouts of the process is open within."""
        yield self

    async def play(self, job: RolloutJob, execution: str) -> RolloutResult:
        if noop.plays(self._known(job.environment), self._config):
            return await noop.rollout(job, self._config.noop)
        raise StageError(f"{execution}: no environment but noop")

    async def score(self, job: ScoreJob) -> ScoreResult:
        raise StageError(f"the environment {job.environment!r} does not score groups")

    async def survey(self, job: SurveyJob) -> SurveyResult:
        self._known(job.environment)
        return SurveyResult(examples=noop.EXAMPLES, scores_groups=False)

    def _known(self, environment: str) -> str:
        if environment not in self._config.environments:
            known = ", ".join(sorted(self._config.environments))
            raise StageError(f"this worker has no environment {environment!r}; its configuration has: {known}")
        return environment

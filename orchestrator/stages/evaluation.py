"""The jobs of evaluations: they play and score as the run does, with records of their own.

Temporary: it goes when evaluations are groups.
"""

from typing import Any

from headpond.ids import RolloutId
from headpond.orchestrator.examples.evaluation import EVALUATION, EVALUATION_SCORE, Evaluations
from headpond.orchestrator.ledger.rows import JobRecord
from headpond.orchestrator.stage import Parts, RunStage
from headpond.orchestrator.stages.play import Play
from headpond.records.inputs import GroupInputs
from headpond.records.rollout import RolloutResult
from headpond.tasks import inputs
from headpond.tasks.stage import Reply
from headpond.tasks.stages import play, score


class EvaluationPlay(RunStage[RolloutResult]):
    stage = play.STAGE

    def __init__(self, parts: Parts, evaluations: Evaluations, play: Play) -> None:
        super().__init__(parts)
        self.name = EVALUATION
        self._evaluations = evaluations
        self._play = play

    def fields(self, job: JobRecord) -> dict[str, Any]:
        evaluation, index = self._ledger.evaluations[int(job.subject)], RolloutId.parse(job.id).number
        return self._play.fields_of(evaluation.name, index // evaluation.rollouts)

    def settled(self, job: JobRecord, result: RolloutResult, reply: Reply) -> None:
        self._evaluations.settle(job, result)

    def died(self, job: JobRecord, why: str, error: str) -> None:
        self._evaluations.died(job, why)


class EvaluationScore(RunStage[score.ScoreResult]):
    stage = score.STAGE

    def __init__(self, parts: Parts, evaluations: Evaluations) -> None:
        super().__init__(parts)
        self.name = EVALUATION_SCORE
        self._evaluations = evaluations

    def fields(self, job: JobRecord) -> dict[str, Any]:
        return {"environment": self._ledger.evaluations[int(job.subject)].name}

    def key(self, job: JobRecord) -> str:
        return inputs.key(self._run, job.id)

    async def inputs(self, job: JobRecord) -> GroupInputs:
        return self._evaluations.score_inputs(job)

    def fits(self, job: JobRecord, result: score.ScoreResult) -> bool:
        return self._evaluations.fits(job, result.rewards)

    def settled(self, job: JobRecord, result: score.ScoreResult, reply: Reply) -> None:
        self._evaluations.scored(job, result.rewards, result.named)

    def died(self, job: JobRecord, why: str, error: str) -> None:
        self._evaluations.died(job, why)

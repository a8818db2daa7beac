"""Survey: how many examples each environment has, asked once per start."""

from headpond import ids
from headpond.errors import RunError, sentence
from headpond.orchestrator.ledger.rows import JobRecord
from headpond.orchestrator.stage import RunStage
from headpond.tasks.stage import Reply
from headpond.tasks.stages import survey


class Survey(RunStage[survey.SurveyResult]):
    stage = survey.STAGE

    def begin(self) -> None:
        """Add a job for every environment whose number of examples is unknown."""
        surveyed = {job.subject for job in self._ledger.jobs.values() if job.stage == self.name}
        for name in sorted((self._config.environments.keys() | self._config.evaluation.keys()) - surveyed):
            if self._ledger.state.environments[name].examples is None:
                # The epoch makes the id unique per start: a dead job's id is not reused.
                self._ledger.add_job(ids.survey_job(self._ledger.state.epoch, name), self.name, name)

    def fields(self, job: JobRecord) -> dict[str, str]:
        return {"environment": job.subject}

    def settled(self, job: JobRecord, result: survey.SurveyResult, reply: Reply) -> None:
        self._ledger.state.environments[job.subject].examples = result.examples
        self._ledger.state.environments[job.subject].scores_groups = result.scores_groups

    def died(self, job: JobRecord, why: str, error: str) -> None:
        problem = sentence(f"the environment {job.subject!r} cannot be used: {why}")
        raise RunError(f"{problem} Fix it, then start the run again")

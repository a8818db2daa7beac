"""Survey: the number of an environment's examples, which only workers can count. One job per start of the run."""

from headpond.broker.queues import Queue
from headpond.records.wire import Result
from headpond.tasks.stage import Call, Message, Stage, Subject


class SurveyMessage(Message):
    environment: str


class SurveyResult(Result):
    examples: int
    scores_groups: bool


async def survey(call: Call[SurveyMessage]) -> SurveyResult:
    environment = call.player.environment(call.message.environment)
    return SurveyResult(examples=environment.size, scores_groups=environment.scores_groups)


STAGE = Stage(
    name="survey",
    queue=Queue.ROLLOUTS,
    task="headpond.rollouts.survey",
    subject=Subject.ENVIRONMENT,
    message=SurveyMessage,
    result=SurveyResult,
    body=survey,
)

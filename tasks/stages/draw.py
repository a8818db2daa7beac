"""Draw: a sampler draws the next examples of an environment."""

from typing import Annotated

from pydantic import Field

from headpond.broker.queues import Queue
from headpond.data import STATE_LIMIT_BYTES, PlayedGroup
from headpond.data import draw as draw_examples
from headpond.errors import StageError
from headpond.records.wire import Result, WireModel
from headpond.tasks import inputs
from headpond.tasks.stage import Call, PlanMessage, Stage, Subject

DRAWN_LIMIT = 1024  # examples of one draw


class DrawMessage(PlanMessage):
    environment: str


class DrawInputs(WireModel):
    """The file that the job reads."""

    environment: str
    size: int  # examples of the environment
    seed: int
    count: int  # examples to draw
    played: list[PlayedGroup]  # groups that ended since the draw before
    state: str | None  # the sampler's state after the draw before


class DrawResult(Result):
    examples: Annotated[tuple[int, ...], Field(max_length=DRAWN_LIMIT)]  # none: the data has ended
    # the sampler's state after this draw: JSON text that only `headpond.data` reads
    state: Annotated[str, Field(max_length=STATE_LIMIT_BYTES)]


def draw(call: Call[DrawMessage]) -> DrawResult:
    asked = inputs.read(call.store, call.message.plan, DrawInputs)
    settings = call.config.environments.get(asked.environment)
    if settings is None:
        raise StageError(f"this worker has no environment {asked.environment!r}: add it to its configuration")
    drawn = draw_examples(
        settings.sampler,
        settings.sampler_options,
        environment=asked.environment,
        size=asked.size,
        seed=asked.seed,
        count=asked.count,
        played=asked.played,
        state=asked.state,
    )
    return DrawResult(examples=tuple(drawn.examples), state=drawn.state)


STAGE = Stage(
    name="draw",
    queue=Queue.ADVANTAGES,
    task="headpond.advantages.draw",
    subject=Subject.ENVIRONMENT,
    message=DrawMessage,
    result=DrawResult,
    body=draw,
)

"""The section `[evaluation.NAME]`."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from headpond.config.engine import EnvironmentCode, Sampling
from headpond.sections import Reader, read_by

BY_ORCHESTRATOR = read_by(Reader.ORCHESTRATOR)


class EvaluationSettings(EnvironmentCode):
    """Examples that are played every few policy versions and never trained on. The name differs from those of
    `[environments.NAME]`."""

    declared = read_by(Reader.ORCHESTRATOR, Reader.ROLLOUTS)

    every: Annotated[PositiveInt, BY_ORCHESTRATOR] = 10
    """Policy versions from one evaluation to the next. One that takes longer delays the next."""
    at_start: Annotated[bool, BY_ORCHESTRATOR] = True
    """Whether the version that the run begins with is evaluated."""
    examples: Annotated[PositiveInt | Literal["all"], BY_ORCHESTRATOR] = 64
    """Examples that are played, the first ones of the environment: the same in every evaluation."""
    rollouts: Annotated[PositiveInt, BY_ORCHESTRATOR] = 1
    """Rollouts of each example."""
    share: Annotated[float, Field(gt=0, le=1), BY_ORCHESTRATOR] = 0.25
    """Most of its rollouts in flight at once, as a share of `rollouts.max_in_flight` and in addition to those, so that
    training goes on."""
    hold_s: Annotated[NonNegativeFloat, BY_ORCHESTRATOR] = 600.0
    """Seconds that the end of the run waits for it, and the next update of the weights where Headpond makes it. Under
    a trainer's own updates, the versions that played it are reported."""
    sampling: Sampling | None = None
    """Sampling parameters of its requests, all of them. Default: those of `policy.sampling`."""

"""Settings for tests and benchmarks: `[noop]`, `[testing]`, and environments with `use = "noop"`.

They exist only in processes with HEADPOND_TEST_HOOKS=1, where `load` returns a `HookedRunConfig`. Elsewhere they are
unknown settings.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveInt

from headpond.config.engine import EnvironmentName, EnvironmentSettings
from headpond.config.run import RunConfig
from headpond.declarations.sections import OF_HOST, Declared, Fraction, Reader, Section

SWITCH = "HEADPOND_TEST_HOOKS"
NOOP = "noop"


class Noop(Section):
    """Stages that do nothing, for tests and measurements of the pipeline itself."""

    declared = Declared(read_by=(Reader.ROLLOUTS, Reader.COMPUTE), of_host=True)

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


class Testing(Section):
    """Faults of the orchestrator, and what tests of other things leave out."""

    declared = OF_HOST

    crash_at: str | None = None
    """`POINT` or `POINT:N`: the orchestrator kills itself when it passes POINT for the Nth time."""


class HookedRunConfig(RunConfig):
    """A `RunConfig` with test hooks. Without `[environments]`, one no-op environment is played."""

    environments: dict[EnvironmentName, EnvironmentSettings] = Field(default={NOOP: EnvironmentSettings(use=NOOP)})
    noop: Noop = Noop()
    testing: Testing = Testing()


def model_for(environ: Mapping[str, str]) -> type[RunConfig]:
    return HookedRunConfig if environ.get(SWITCH) == "1" else RunConfig


def noop_settings(config: RunConfig, *environments: str) -> Noop | None:
    """The settings of no-op stages, if `environments` are all no-ops."""
    if not isinstance(config, HookedRunConfig):
        return None
    known = {**config.environments, **config.evaluation}
    used = [known[name].use for name in environments if name in known]
    return config.noop if used == [NOOP] * len(environments) else None


def crash_at(config: RunConfig) -> str | None:
    return config.testing.crash_at if isinstance(config, HookedRunConfig) else None


def checks_engine(config: RunConfig) -> bool:
    """Whether a start of the run examines its engine: not if only no-ops are played."""
    return config.engine.check and not noop_settings(config, *config.environments)

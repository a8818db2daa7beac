"""A sampler draws the next examples of an environment."""

from penstock.config import RunConfig
from penstock.errors import StageError
from penstock.messages import DrawInputs, DrawResult
from penstock.sampling import draw


def draw_examples(inputs: DrawInputs, config: RunConfig) -> DrawResult:
    settings = config.environments.get(inputs.environment)
    if settings is None:
        raise StageError(f"this worker has no environment {inputs.environment!r}: add it to its configuration")
    drawn = draw(
        settings.sampler,
        settings.sampler_options,
        environment=inputs.environment,
        size=inputs.size,
        seed=inputs.seed,
        count=inputs.count,
        played=inputs.played,
        state=inputs.state,
    )
    return DrawResult(examples=tuple(drawn.examples), state=drawn.state)

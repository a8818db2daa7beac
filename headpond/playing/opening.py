"""Opens what the rollouts of a process share."""

import logging

from headpond.config import RunConfig
from headpond.engines.dialects import Dialect, dialect_of
from headpond.errors import InfrastructureFailure
from headpond.renderers import PooledRenderer, RendererKey, RendererPools
from headpond.runtime.offload import in_io_thread

logger = logging.getLogger("headpond.playing")


async def open_dialect(config: RunConfig) -> Dialect:
    """The engine's dialect, with its renderer built before the first rollout."""
    settings, place = config.policy.renderer, config.place_of("engine", "dialect")
    if settings is None:
        return await in_io_thread(dialect_of, config.engine, place=place)
    renderer = PooledRenderer(RendererPools(), RendererKey.of(settings, config.engine.model))
    dialect = await in_io_thread(dialect_of, config.engine, renderer=renderer, place=place)
    try:
        await renderer.warm_up()
    except InfrastructureFailure as error:
        logger.warning("action=not_warmed_up error=%s: the first rollout will retry", error)
    return dialect

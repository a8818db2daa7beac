"""Configuration: TOML, then `PENSTOCK_*` variables, then flags. `load` returns a `RunConfig`."""

from penstock.config.loading import load, redis_url
from penstock.config.run import DEFAULT_REDIS_URL, Http, Rollouts, RunConfig

__all__ = ["DEFAULT_REDIS_URL", "Http", "Rollouts", "RunConfig", "load", "redis_url"]

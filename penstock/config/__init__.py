"""Configuration: TOML, then `PENSTOCK_*` variables, then flags. `load` returns a `RunConfig`."""

from penstock.config.run import DEFAULT_REDIS_URL, Http, Noop, Rollouts, RunConfig, load, redis_url

__all__ = ["DEFAULT_REDIS_URL", "Http", "Noop", "Rollouts", "RunConfig", "load", "redis_url"]

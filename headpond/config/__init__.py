"""Configuration: TOML, then `HEADPOND_*` variables, then flags. `load` returns a `RunConfig`.

The names are imported on first use: `headpond.config.redis_address` alone needs none of the settings.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headpond.config.run import DEFAULT_REDIS_URL, Http, Rollouts, RunConfig
    from headpond.config.sources import load

__all__ = ["DEFAULT_REDIS_URL", "Http", "Rollouts", "RunConfig", "load"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("headpond.config.sources" if name == "load" else "headpond.config.run"), name)
    globals()[name] = value
    return value

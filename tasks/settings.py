"""The configuration of a worker process: read once, from its own environment, never from a message."""

import functools

from penstock import config
from penstock.errors import ConfigError


@functools.cache
def settings() -> config.RunConfig:
    try:
        return config.load(None)
    except ConfigError as error:
        raise SystemExit(f"penstock: {error}") from error

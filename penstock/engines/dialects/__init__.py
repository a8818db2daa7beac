"""The servers that Penstock can use, by `engine.dialect`: one class per module owns the request and the response.

Everything that training needs (ids, logprobs, routed experts) is requested here and cannot be switched off.
"""

import inspect
from typing import Any

from penstock.config.engine import DIALECTS, Engine
from penstock.engines.dialects.base import (
    ABSENT,
    AsyncRenderer,
    ChatDialect,
    Dialect,
    Logprob,
    Prompt,
    ResponseFields,
    TokenId,
    read_ids,
    read_message,
    read_part,
)
from penstock.errors import ConfigError
from penstock.registry import Facts, import_attribute

__all__ = [
    "ABSENT",
    "AsyncRenderer",
    "ChatDialect",
    "Dialect",
    "Logprob",
    "Prompt",
    "ResponseFields",
    "TokenId",
    "check_dialect",
    "dialect_of",
    "load_dialect",
    "read_ids",
    "read_message",
    "read_part",
]


SETTING = "engine.dialect"


def dialect_of(settings: Engine, *, renderer: AsyncRenderer | None = None) -> Dialect:
    """ConfigError if the class cannot be loaded, if it needs a renderer and has none, or cannot use one."""
    setting = f"{SETTING} = {settings.dialect!r}"
    kind = load_dialect(settings.dialect)
    if renderer is None and not kind.takes_messages:
        raise ConfigError(f"{setting} sends tokens and needs a renderer: set policy.renderer")
    if renderer is not None and not kind.takes_tokens:
        raise ConfigError(
            f"{setting} sends messages and cannot use policy.renderer: remove it, or set "
            'engine.dialect = "sglang" or "generate"'
        )
    try:
        return kind(settings, renderer=renderer)
    except Exception as error:
        raise ConfigError(f"{setting} cannot be constructed: {type(error).__name__}: {error}") from error


def load_dialect(name: str) -> type[Dialect]:
    """The class that `engine.dialect` names. Imports code of the user: only processes that use the engine call this."""
    setting = f"{SETTING} = {name!r}"
    kind: Any = import_attribute(DIALECTS.get(name, name), setting=SETTING)
    if not (isinstance(kind, type) and issubclass(kind, Dialect)):
        raise ConfigError(f"{setting} is not a subclass of penstock.engines.dialects.Dialect")
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise ConfigError(f"{setting}: {kind.__name__} does not define {missing}")
    if not str(getattr(kind, "endpoint", "")).startswith("/"):
        raise ConfigError(f"{setting}: {kind.__name__}.endpoint must be a path such as /v1/chat/completions")
    return kind


def check_dialect(name: str, *, setting: str) -> Facts:
    """For `registry.check_in_child`."""
    assert setting == SETTING
    load_dialect(name)
    return {}

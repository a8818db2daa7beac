"""The servers that Headpond can use, by `engine.dialect`. One class per module owns the request and
the response.

Requests always ask for everything that training needs (ids, logprobs, routed experts). Callers
cannot switch that off.
"""

import inspect
from typing import TYPE_CHECKING, Any

from headpond.config.engine import DIALECTS, Engine
from headpond.declarations.named_code import Facts, checked_function, import_class
from headpond.engines.dialects.base import (
    ABSENT,
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
from headpond.engines.weights import Call, ControlCalls
from headpond.errors import ConfigError, error_boundary

if TYPE_CHECKING:
    from headpond.renderers import PooledRenderer

__all__ = [
    "ABSENT",
    "Call",
    "ChatDialect",
    "ControlCalls",
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
# The methods of a dialect that Headpond calls, with their arguments. Only a ChatDialect has
# `required_fields`.
METHODS = {
    "request_fields": ("prompt", "sampling"),
    "required_fields": ("prompt",),
    "read": ("text",),
    "chat_completion": ("body", "turn"),
    "is_context_limit": ("error",),
}


def dialect_of(settings: Engine, *, renderer: "PooledRenderer | None" = None, place: str = "") -> Dialect:
    """The dialect of `settings`. `place` is that of the setting: `RunConfig.place_of`.

    ConfigError if the class cannot be loaded, if it needs a renderer and has none, or cannot use
    one.
    """
    try:
        return _constructed(settings, renderer)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}" if place else str(error)) from error


def _constructed(settings: Engine, renderer: "PooledRenderer | None") -> Dialect:
    setting = f"{SETTING} = {settings.dialect!r}"
    kind = load_dialect(settings.dialect)
    if renderer is None and not kind.takes_messages:
        raise ConfigError(f"{setting} sends tokens and needs a renderer: set policy.renderer")
    if renderer is not None and not kind.takes_tokens:
        raise ConfigError(
            f"{setting} sends messages and cannot use policy.renderer: remove it, or set "
            'engine.dialect = "sglang" or "generate"'
        )
    with error_boundary(ConfigError, f"{setting} cannot be constructed"):
        dialect = kind(settings, renderer=renderer)
    if getattr(dialect, "settings", None) is not settings:
        raise ConfigError(
            f"{setting}: {kind.__name__}.__init__ must call super().__init__(settings, renderer=renderer)"
        )
    return dialect


def load_dialect(name: str) -> type[Dialect]:
    """The class that `engine.dialect` names. This imports the user's code: only processes that use
    the engine call it."""
    setting = f"{SETTING} = {name!r}"
    kind = import_class(DIALECTS.get(name, name), setting=SETTING, base=Dialect)
    if not str(getattr(kind, "endpoint", "")).startswith("/"):
        raise ConfigError(f"{setting}: {kind.__name__}.endpoint must be a path such as /v1/chat/completions")
    _check_values(kind, setting)
    _check_methods(kind, setting)
    return kind


def _check_values(kind: type[Dialect], setting: str) -> None:
    phrases: Any = kind.context_limit
    texts = [text for text in phrases if isinstance(text, str)] if isinstance(phrases, tuple) else []
    if not isinstance(phrases, tuple) or len(texts) != len(phrases) or "" in texts:
        raise ConfigError(f"{setting}: {kind.__name__}.context_limit must be a tuple of lower-case texts: {phrases!r}")
    if wrong := [text for text in texts if text != text.lower()]:
        raise ConfigError(f"{setting}: {kind.__name__}.context_limit must be lower-case: write {wrong[0].lower()!r}")
    control: Any = kind.control
    if not isinstance(control, ControlCalls):
        raise ConfigError(f"{setting}: {kind.__name__}.control must be a ControlCalls: {control!r}")
    for name in ("prompt_key", "experts_key"):
        if not isinstance(getattr(kind, name), bytes):
            raise ConfigError(f"{setting}: {kind.__name__}.{name} must be bytes: {getattr(kind, name)!r}")


def _check_methods(kind: type[Dialect], setting: str) -> None:
    for name, arguments in METHODS.items():
        if not hasattr(kind, name):
            continue
        method, label = getattr(kind, name), f"{setting}: {kind.__name__}.{name}"
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            raise ConfigError(f"{label} must be a plain function, not async")
        bound = isinstance(inspect.getattr_static(kind, name), (staticmethod, classmethod))
        checked_function(method, *(() if bound else ("self",)), *arguments, what=label)


def check_dialect(name: str, *, setting: str) -> Facts:
    """Check that a dialect can be loaded. `registry.check_in_child` calls this."""
    assert setting == SETTING
    load_dialect(name)
    return {}

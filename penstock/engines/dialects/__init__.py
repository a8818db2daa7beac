"""The servers that Penstock can use, by `engine.dialect`: one class per module owns the request and the response.

Everything that training needs (ids, logprobs, routed experts) is requested here and cannot be switched off.
"""

import difflib
import importlib
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

__all__ = [
    "ABSENT",
    "AsyncRenderer",
    "ChatDialect",
    "Dialect",
    "Logprob",
    "Prompt",
    "ResponseFields",
    "TokenId",
    "dialect_of",
    "load_dialect",
    "read_ids",
    "read_message",
    "read_part",
]


def dialect_of(settings: Engine, *, renderer: AsyncRenderer | None = None) -> Dialect:
    """ConfigError if the class cannot be loaded, if it needs a renderer and has none, or cannot use one."""
    setting = f'engine.dialect = "{settings.dialect}"'
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
    setting = f'engine.dialect = "{name}"'
    module_name, _, class_name = DIALECTS.get(name, name).partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        advice = "install it where rollout workers and session servers run, or add its directory to PYTHONPATH"
        raise ConfigError(f"{setting} cannot be imported: {error}; {advice}") from error
    except Exception as error:
        raise ConfigError(f"{setting} cannot be imported: {type(error).__name__}: {error}") from error
    kind: Any = getattr(module, class_name, None)
    if kind is None:
        near = difflib.get_close_matches(class_name, vars(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{setting}: module {module_name} has no class {class_name!r}{hint}")
    if not (isinstance(kind, type) and issubclass(kind, Dialect)):
        raise ConfigError(f"{setting}: {class_name} is not a subclass of penstock.engines.dialects.Dialect")
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise ConfigError(f"{setting}: {class_name} does not define {missing}")
    if not str(getattr(kind, "endpoint", "")).startswith("/"):
        raise ConfigError(f"{setting}: {class_name}.endpoint must be a path such as /v1/chat/completions")
    return kind

"""The servers that Penstock can use, by `engine.dialect`: one class per module owns the request and the response.

Everything that training needs (ids, logprobs, routed experts) is requested here and cannot be switched off.
"""

from penstock.config.engine import Engine
from penstock.engines.dialects.base import AsyncRenderer, Dialect, Endpoint, Prompt
from penstock.engines.dialects.generate import Generate
from penstock.engines.dialects.sglang import Sglang
from penstock.engines.dialects.vllm import Vllm

__all__ = ["AsyncRenderer", "Dialect", "Endpoint", "Generate", "Prompt", "Sglang", "Vllm", "dialect_of"]

DIALECTS: dict[str, type[Dialect]] = {"vllm": Vllm, "sglang": Sglang, "generate": Generate}


def dialect_of(settings: Engine, *, renderer: AsyncRenderer | None = None) -> Dialect:
    """ConfigError if the dialect needs a renderer and has none, or cannot use one."""
    return DIALECTS[settings.dialect](settings, renderer=renderer)

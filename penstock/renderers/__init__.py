"""Messages <-> token ids where the engine is not asked for that: `PooledRenderer` is what policies and sessions use."""

from penstock.renderers.backends import RendererKey
from penstock.renderers.pools import PooledRenderer, RendererPools
from penstock.renderers.protocol import NextTurn, Renderer, next_prompt

__all__ = [
    "NextTurn",
    "PooledRenderer",
    "Renderer",
    "RendererKey",
    "RendererPools",
    "next_prompt",
]

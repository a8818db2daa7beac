"""Messages <-> token ids, for engines that do not return them. Policies and sessions use `PooledRenderer`."""

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

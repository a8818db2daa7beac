"""Messages <-> token ids where the engine is not asked for that: `PooledRenderer` is what policies and sessions use."""

from penstock.renderers.backends import RendererKey
from penstock.renderers.pooled import PooledRenderer
from penstock.renderers.pools import RendererPools
from penstock.renderers.protocol import NextTurn, Renderer, next_prompt
from penstock.renderers.turns import SaidTurn, TurnTokens

__all__ = [
    "NextTurn",
    "PooledRenderer",
    "Renderer",
    "RendererKey",
    "RendererPools",
    "SaidTurn",
    "TurnTokens",
    "next_prompt",
]

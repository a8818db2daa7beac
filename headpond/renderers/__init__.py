"""Messages <-> token ids, for engines that do not return token ids. Policies and sessions use
`PooledRenderer`."""

from headpond.renderers.pools import PooledRenderer
from headpond.renderers.protocol import NextTurn, Renderer, next_prompt

__all__ = [
    "NextTurn",
    "PooledRenderer",
    "Renderer",
    "next_prompt",
]

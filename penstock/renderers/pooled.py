"""A renderer for coroutines: the pool of its key does the work, off the loop, and is built by whoever comes first."""

import functools
from collections.abc import Sequence
from typing import Any

from penstock.fingerprints import Ids
from penstock.renderers.backends import RendererKey
from penstock.renderers.pools import RendererPools
from penstock.renderers.protocol import NextTurn, Renderer, Tools, next_prompt
from penstock.renderers.turns import SaidTurn, TurnTokens, turn_tokens


class PooledRenderer:
    def __init__(self, pools: RendererPools, key: RendererKey) -> None:
        self._pools = pools
        self.key = key

    async def warm_up(self) -> None:
        await self._pools.warm_up([self.key])

    async def prompt_ids(self, turn: NextTurn) -> Ids:
        pool = await self._pools.pool(self.key)
        return await pool.encode(functools.partial(next_prompt, turn=turn))

    async def message(self, completion_ids: Ids, *, prompt_ids: Ids, tools: Tools) -> dict[str, Any]:
        def read(renderer: Renderer) -> dict[str, Any]:
            return renderer.message(completion_ids, prompt_ids=prompt_ids, tools=tools)

        pool = await self._pools.pool(self.key)
        return await pool.decode(read)

    async def tokens(self, turns: Sequence[SaidTurn]) -> list[TurnTokens]:
        """Of each turn: its own where it has them; the others are rendered, in one call."""
        missing = [turn for turn in turns if turn.tokens is None]
        rendered = iter(await self._rendered(missing) if missing else [])
        return [turn.tokens or next(rendered) for turn in turns]

    async def _rendered(self, turns: Sequence[SaidTurn]) -> list[TurnTokens]:
        pool = await self._pools.pool(self.key)
        return await pool.encode(lambda renderer: [turn_tokens(renderer, turn) for turn in turns])

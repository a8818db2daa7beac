"""The straightforward rollout: every answer parsed whole and every routed row decoded, in Python's default threads.

What `penstock bench rollout-worker` holds the worker against: the same conversation with the same engine, in the same
kind of process, without recording, byte budget or files.
"""

import asyncio
import base64
import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import aiohttp
import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import Field

from bench.talk import EXAMPLES, said_by_the_user
from penstock.environments.protocol import Message, Policy
from penstock.errors import PolicyFailure

DONE = "parsed"
"""What its rollouts end with, as they record nothing."""


class ParseAll:
    def __init__(self, *, turns: Annotated[int, Field(ge=1)], said: Annotated[int, Field(ge=1)], url: str) -> None:
        self.examples = range(EXAMPLES)
        self._turns = turns
        self._said = said
        self._url = f"{url}/v1/chat/completions"
        self._threads = ThreadPoolExecutor()  # as wide as asyncio's own: cores + 4
        self._http: aiohttp.ClientSession | None = None

    async def rollout(self, example: int, policy: Policy) -> float:
        loop, rows = asyncio.get_running_loop(), list[NDArray[np.uint8]]()
        messages: list[Message] = []
        for _ in range(self._turns):
            messages.append({"role": "user", "content": said_by_the_user(example, self._said)})
            body = await self._asked(messages)
            reply = await loop.run_in_executor(self._threads, json.loads, body)
            rows.append(await loop.run_in_executor(self._threads, _decoded, reply))
            messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
        await loop.run_in_executor(self._threads, _joined, rows)
        raise PolicyFailure(DONE)

    async def _asked(self, messages: list[Message]) -> bytes:
        if self._http is None:
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        data = orjson.dumps({"messages": messages, "logprobs": True, "return_token_ids": True})
        while True:
            # Its loop may stand for longer than an engine keeps a connection that is silent.
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with self._http.post(self._url, data=data) as response:
                    response.raise_for_status()
                    return await response.read()


def _decoded(reply: dict[str, Any]) -> NDArray[np.uint8]:
    routed = reply["choices"][0]["routed_experts"]
    return np.frombuffer(base64.b64decode(routed["data"]), np.uint8).reshape(routed["shape"])


def _joined(rows_of_turns: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """What each turn adds to those before it, in one array."""
    before = 0
    new: list[NDArray[np.uint8]] = []
    for rows in rows_of_turns:
        new.append(rows[before:])
        before = len(rows)
    return np.concatenate(new)

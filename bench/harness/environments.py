"""Environments of the benchmarks: conversations of fixed length, recorded by Headpond or parsed by the baseline."""

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

from headpond.environments.protocol import Policy
from headpond.errors import PolicyFailure
from headpond.turn import Message

EXAMPLES = 1_000
TEXT = "Go on from where you were, and say why. "
PARSED = "parsed"
"""The policy error that ends every rollout of `ParseAll`, which records nothing."""


def user_message(example: int, characters: int) -> Message:
    text = (TEXT * (characters // len(TEXT) + 1))[:characters]
    return {"role": "user", "content": f"{example}: {text}"}


class Conversation:
    """A conversation that only produces bytes: each turn adds a user message of the same length and a completion."""

    def __init__(self, *, turns: Annotated[int, Field(ge=1)], user_tokens: Annotated[int, Field(ge=1)]) -> None:
        """The simulated engine counts one token per character."""
        self.examples = range(EXAMPLES)
        self._turns = turns
        self._user_tokens = user_tokens

    async def rollout(self, example: int, policy: Policy) -> float:
        messages: list[Message] = []
        reward = 0.0
        for _ in range(self._turns):
            messages.append(user_message(example, self._user_tokens))
            completion = await policy.chat(messages)
            messages.append(completion.message)
            reward += completion.content.count("e")
        return reward


class ParseAll:
    """Baseline of `bench rollout-worker`: parses every response and decodes all routed experts in asyncio's threads.

    Plays the conversation of `Conversation` with the same engine, without recording, byte budget or files.
    """

    def __init__(
        self, *, turns: Annotated[int, Field(ge=1)], user_tokens: Annotated[int, Field(ge=1)], url: str
    ) -> None:
        self.examples = range(EXAMPLES)
        self._turns = turns
        self._user_tokens = user_tokens
        self._url = f"{url}/v1/chat/completions"
        self._threads = ThreadPoolExecutor()  # as wide as asyncio's default pool: cores + 4
        self._http: aiohttp.ClientSession | None = None

    async def rollout(self, example: int, policy: Policy) -> float:
        loop, rows = asyncio.get_running_loop(), list[NDArray[np.uint8]]()
        messages: list[Message] = []
        for _ in range(self._turns):
            messages.append(user_message(example, self._user_tokens))
            body = await self._post(messages)
            response = await loop.run_in_executor(self._threads, json.loads, body)
            rows.append(await loop.run_in_executor(self._threads, _decode_experts, response))
            messages.append({"role": "assistant", "content": response["choices"][0]["message"]["content"]})
        await loop.run_in_executor(self._threads, _join_experts, rows)
        raise PolicyFailure(PARSED)

    async def _post(self, messages: list[Message]) -> bytes:
        if self._http is None:
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        data = orjson.dumps({"messages": messages, "logprobs": True, "return_token_ids": True})
        while True:
            # Its loop may block for longer than the engine keeps an idle connection.
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with self._http.post(self._url, data=data) as response:
                    response.raise_for_status()
                    return await response.read()


def _decode_experts(response: dict[str, Any]) -> NDArray[np.uint8]:
    routed = response["choices"][0]["routed_experts"]
    return np.frombuffer(base64.b64decode(routed["data"]), np.uint8).reshape(routed["shape"])


def _join_experts(rows_of_turns: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Concatenate the rows that each turn adds to the previous ones."""
    before = 0
    new: list[NDArray[np.uint8]] = []
    for rows in rows_of_turns:
        new.append(rows[before:])
        before = len(rows)
    return np.concatenate(new)

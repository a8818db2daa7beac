"""Environments of the schedules with an engine: how long a rollout is depends on its example alone, its reward on what
the engine has generated, so that what a schedule should deliver is known."""

import time
from pathlib import Path

import aiohttp
import xxhash

from headpond.environments import AgentPolicy
from headpond.environments.protocol import Policy
from headpond.errors import InfrastructureFailure

EXAMPLES = 100_000
LEAST_TOKENS, MOST_TOKENS = 16, 115
QUESTION = "Example {:06d}: say something."


def tokens_of(example: int, seed: int) -> int:
    """Completion tokens of each rollout of an example.

    The seed is hashed as text: XXH3 of up to three bytes only combines them with its seed, so that consecutive seeds
    gave neighbouring examples the same lengths in another order, and the schedules of a series were not independent.
    """
    spread = MOST_TOKENS - LEAST_TOKENS + 1
    return LEAST_TOKENS + xxhash.xxh3_64_intdigest(f"{seed}/{example}".encode()) % spread


def reward_of(example: int, completion: str, seed: int) -> float:
    """Uniform in [0, 1)."""
    return xxhash.xxh3_64_intdigest(f"{example}/{completion}".encode(), seed) / 2**64


class Speaking:
    """Chats with the policy in the worker."""

    def __init__(self, wedge_while: str, seed: int) -> None:
        self.examples = range(EXAMPLES)
        self._seed = seed
        self._wedge = Path(wedge_while)

    def _pass_wedge(self) -> None:
        while self._wedge.exists():
            time.sleep(0.05)

    async def rollout(self, example: int, policy: Policy) -> float:
        self._pass_wedge()
        messages = [{"role": "user", "content": QUESTION.format(example)}]
        completion = await policy.chat(messages, max_tokens=tokens_of(example, self._seed))
        return reward_of(example, completion.content, self._seed)


class Calling(Speaking):
    """The same through a session server, as an agent that is given a URL."""

    external_agent = True

    async def rollout(self, example: int, policy: AgentPolicy) -> float:  # type: ignore[override]
        self._pass_wedge()
        body = {
            "messages": [{"role": "user", "content": QUESTION.format(example)}],
            "max_tokens": tokens_of(example, self._seed),
        }
        url, headers = f"{policy.base_url}/chat/completions", {"Authorization": f"Bearer {policy.api_key}"}
        try:
            async with aiohttp.ClientSession(headers=headers) as http, http.post(url, json=body) as response:
                response.raise_for_status()
                answer = await response.json()
        except aiohttp.ClientError as error:
            raise InfrastructureFailure(f"the session server does not answer: {error!r}") from error
        return reward_of(example, answer["choices"][0]["message"]["content"], self._seed)

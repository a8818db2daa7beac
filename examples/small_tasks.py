"""The demo's environments: tasks that a model of 79,000 parameters learns from rewards within a minute.

[environments.copy]
use = "small_tasks:Copy"  # with the directory of this file on PYTHONPATH
"""

import asyncio
import itertools
from typing import Any

import aiohttp

from headpond.environments import AgentPolicy, Policy
from headpond.errors import InfrastructureFailure

DIGITS = "1234"
MAX_TOKENS = 6
ATTEMPTS, FIRST_PAUSE_S = 6, 0.1  # 6 s together: an update of the weights takes less
WORDS = ["".join(word) for word in itertools.product(DIGITS, repeat=2)]


class Copy:
    """One turn: repeat two digits."""

    examples = WORDS

    async def rollout(self, example: str, policy: Policy) -> float:
        completion = await policy.chat([question(example)], max_tokens=MAX_TOKENS)
        return share_right(completion.content, example)


class Guess:
    """Two turns: find a number with one hint. Two is the first guess that always leads to it."""

    examples = (1, 2, 3)

    async def rollout(self, example: int, policy: Policy) -> float:
        messages = [{"role": "user", "content": "guess 1-3"}]
        first = await policy.chat(messages, max_tokens=MAX_TOKENS)
        guess = first.content[:1]
        if guess == str(example):
            return 1.0
        hint = "low" if guess < str(example) else "high"
        second = await policy.chat([*messages, first.message, {"role": "user", "content": hint}], max_tokens=MAX_TOKENS)
        return float(second.content[:1] == str(example))


class Dictation:
    """Two turns of an agent that knows nothing but a URL and a key: it dictates two words and checks both."""

    external_agent = True
    examples = tuple(itertools.product(WORDS, WORDS))

    async def rollout(self, example: tuple[str, str], policy: AgentPolicy) -> float:
        messages: list[dict[str, Any]] = []
        reward = 0.0
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {policy.api_key}"}) as http:
            for word in example:
                messages.append(question(word))
                body = {"model": policy.model, "messages": messages, "max_tokens": MAX_TOKENS}
                messages.append(await chat(http, f"{policy.base_url}/chat/completions", body))
                reward += share_right(messages[-1]["content"] or "", word) / len(example)
        return reward


async def chat(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Asks again after an error of the server, as the `openai` package does: it may be loading weights."""
    for attempt in range(ATTEMPTS):
        async with http.post(url, json=body) as response:
            if response.status < 500:
                response.raise_for_status()
                return (await response.json())["choices"][0]["message"]
        await asyncio.sleep(FIRST_PAUSE_S * 2**attempt)
    raise InfrastructureFailure(f"{url} could not answer, {ATTEMPTS} times")


def question(word: str) -> dict[str, Any]:
    return {"role": "user", "content": f"copy {word}"}


def share_right(answer: str, word: str) -> float:
    return sum(one == other for one, other in zip(answer, word, strict=False)) / max(len(answer), len(word))

"""Rewards a whole group: each of k rollouts that name the same valid number gets 1 / k."""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from headpond.environments.builtin.arithmetic import last_answer
from headpond.environments.protocol import PlayedRollout, Policy, Score

PROMPT = (
    "Name a whole number from 1 to {largest} that is divisible by {divisor}. Others are asked the same: "
    "choose one that they do not choose. End with a line `Answer: N`."
)


class Distinct:
    def __init__(self, *, largest: Annotated[int, Field(ge=2)] = 30, divisors: Annotated[int, Field(ge=1)] = 10):
        """Example i asks for multiples of 2 + i."""
        self.examples = range(2, min(2 + divisors, largest + 1))
        self._largest = largest

    async def rollout(self, example: int, policy: Policy) -> Score:
        prompt = PROMPT.format(largest=self._largest, divisor=example)
        completion = await policy.chat([{"role": "user", "content": prompt}])
        return Score(reward=float(self._valid_number(example, completion.content) is not None))

    def score_group(self, example: int, rollouts: Sequence[PlayedRollout]) -> list[float]:
        numbers = [None if rollout.error else self._valid_number(example, rollout.last_answer) for rollout in rollouts]
        counts = Counter(numbers)
        return [0.0 if number is None else 1 / counts[number] for number in numbers]

    def _valid_number(self, divisor: int, text: str) -> int | None:
        number = last_answer(text) or 0
        return number if 0 < number <= self._largest and number % divisor == 0 else None

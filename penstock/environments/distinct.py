"""Scored as a group: name a number that the others do not name. A valid number shared by k rollouts is worth 1 / k."""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from penstock.environments.arithmetic import last_answer
from penstock.environments.protocol import Played, Policy
from penstock.environments.scores import Score

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
        reply = await policy.chat([{"role": "user", "content": prompt}])
        return Score(reward=float(self._named(example, reply.content) is not None))

    def score_group(self, example: int, rollouts: Sequence[Played]) -> list[float]:
        named = [None if played.error else self._named(example, played.last_answer) for played in rollouts]
        times = Counter(named)
        return [0.0 if number is None else 1 / times[number] for number in named]

    def _named(self, divisor: int, text: str) -> int | None:
        number = last_answer(text) or 0
        return number if 0 < number <= self._largest and number % divisor == 0 else None

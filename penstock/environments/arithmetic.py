"""Single turn: a sum with products in it. The reward is 1 when the answer's last `Answer: N` is right, else 0."""

import random
import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from penstock.environments.protocol import Policy
from penstock.environments.scores import Score

PROMPT = "What is {problem}? Think it through, then end with a line `Answer: N`, where N is a whole number."
ANSWER = re.compile(r"Answer:\s*(-?\d+)")


@dataclass(frozen=True, kw_only=True)
class Problem:
    text: str
    """numbers, ` + `, ` - ` and ` * `, with the usual precedence: `12 + 3 * 4 - 5`"""
    answer: int


class Sums:
    """The examples; `program.py` has them played by somebody else."""

    def __init__(
        self,
        *,
        size: Annotated[int, Field(ge=1)] = 1_000,
        terms: Annotated[int, Field(ge=1)] = 3,
        largest: Annotated[int, Field(ge=1)] = 20,
        seed: int = 0,
    ) -> None:
        self.examples = [make_problem(terms=terms, largest=largest, seed=f"{seed}/{index}") for index in range(size)]


class Arithmetic(Sums):
    async def rollout(self, example: Problem, policy: Policy) -> Score:
        reply = await policy.chat([{"role": "user", "content": PROMPT.format(problem=example.text)}])
        answer = last_answer(reply.content)
        return Score(reward=float(answer == example.answer), metrics={"answered": float(answer is not None)})


def make_problem(*, terms: int, largest: int, seed: str) -> Problem:
    chosen = random.Random(seed)  # noqa: S311  the same problems in every process, for ever
    text, total = "", 0
    for term in range(terms):
        factors = [chosen.randint(1, largest) for _ in range(chosen.randint(1, 2))]
        sign = chosen.choice("+-") if term else "+"
        text += (f" {sign} " if term else "") + " * ".join(map(str, factors))
        product = factors[0] * (factors[1] if len(factors) > 1 else 1)
        total += product if sign == "+" else -product
    return Problem(text=text, answer=total)


def last_answer(text: str) -> int | None:
    found = ANSWER.findall(text)
    return int(found[-1]) if found and len(found[-1]) < 20 else None

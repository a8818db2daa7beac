"""Single turn: a sum of products. The reward is 1 if the last `Answer: N` of the completion is correct, else 0."""

import random
import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from headpond.environments.protocol import Policy, Score

PROMPT = "What is {problem}? Think it through, then end with a line `Answer: N`, where N is a whole number."
ANSWER = re.compile(r"Answer:\s*(-?\d+)")


@dataclass(frozen=True, kw_only=True)
class Problem:
    text: str  # Numbers, ` + `, ` - ` and ` * `, with the usual precedence: `12 + 3 * 4 - 5`.
    answer: int


class ArithmeticExamples:
    """The problems, shared with `arithmetic_program.py`."""

    def __init__(
        self,
        *,
        size: Annotated[int, Field(ge=1)] = 1_000,
        terms: Annotated[int, Field(ge=1)] = 3,
        largest: Annotated[int, Field(ge=1)] = 20,
        seed: int = 0,
    ) -> None:
        self.examples = [make_problem(terms=terms, largest=largest, seed=f"{seed}/{index}") for index in range(size)]


class Arithmetic(ArithmeticExamples):
    async def rollout(self, example: Problem, policy: Policy) -> Score:
        completion = await policy.chat([{"role": "user", "content": PROMPT.format(problem=example.text)}])
        answer = last_answer(completion.content)
        return Score(reward=float(answer == example.answer), metrics={"answered": float(answer is not None)})


def make_problem(*, terms: int, largest: int, seed: str) -> Problem:
    generator = random.Random(seed)  # noqa: S311  the same problems in every process
    text, total = "", 0
    for term in range(terms):
        factors = [generator.randint(1, largest) for _ in range(generator.randint(1, 2))]
        sign = generator.choice("+-") if term else "+"
        text += (f" {sign} " if term else "") + " * ".join(map(str, factors))
        product = factors[0] * (factors[1] if len(factors) > 1 else 1)
        total += product if sign == "+" else -product
    return Problem(text=text, answer=total)


def last_answer(text: str) -> int | None:
    """Return the number of the last `Answer: N`. Numbers of 20 and more characters do not count."""
    answers = ANSWER.findall(text)
    return int(answers[-1]) if answers and len(answers[-1]) < 20 else None

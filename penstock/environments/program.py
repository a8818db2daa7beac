"""The sums of `arithmetic`, played by a program of its own that knows nothing but a URL (`sums_agent.py`)."""

import sys
from pathlib import Path
from typing import Annotated

from pydantic import Field

from penstock.environments.arithmetic import PROMPT, Arithmetic, Problem, last_answer
from penstock.environments.programs import run_program
from penstock.environments.protocol import AgentPolicy
from penstock.environments.scores import Score

AGENT = Path(__file__).with_name("sums_agent.py")


class Program:
    external_agent = True

    def __init__(
        self,
        *,
        size: Annotated[int, Field(ge=1)] = 1_000,
        terms: Annotated[int, Field(ge=1)] = 3,
        largest: Annotated[int, Field(ge=1)] = 20,
        seed: int = 0,
    ) -> None:
        self.examples = Arithmetic(size=size, terms=terms, largest=largest, seed=seed).examples

    async def rollout(self, example: Problem, policy: AgentPolicy) -> Score:
        ended = await run_program([sys.executable, "-I", str(AGENT), PROMPT.format(problem=example.text)], policy)
        right = ended.exit_code == 0 and last_answer(ended.output) == example.answer
        return Score(reward=float(right), metrics={"exit_code": float(ended.exit_code)})

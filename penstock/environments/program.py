"""The sums of `arithmetic`, played by a program of its own that knows nothing but a URL (`sums_agent.py`)."""

import sys
from pathlib import Path

from penstock.environments.arithmetic import PROMPT, Problem, Sums, last_answer
from penstock.environments.programs import run_program
from penstock.environments.protocol import AgentPolicy
from penstock.environments.scores import Score

AGENT = Path(__file__).with_name("sums_agent.py")


class Program(Sums):
    external_agent = True

    async def rollout(self, example: Problem, policy: AgentPolicy) -> Score:
        ended = await run_program([sys.executable, "-I", str(AGENT), PROMPT.format(problem=example.text)], policy)
        right = ended.exit_code == 0 and last_answer(ended.output) == example.answer
        return Score(reward=float(right), metrics={"exit_code": float(ended.exit_code)})

"""The problems of `arithmetic`, played by a separate program (`arithmetic_agent.py`). It gets a
URL and a key."""

import sys
from pathlib import Path

from headpond.environments.agent_program import run_program
from headpond.environments.builtin.arithmetic import PROMPT, ArithmeticExamples, Problem, last_answer
from headpond.environments.protocol import AgentPolicy, Score

AGENT = Path(__file__).with_name("arithmetic_agent.py")


class ArithmeticProgram(ArithmeticExamples):
    external_agent = True

    async def rollout(self, example: Problem, policy: AgentPolicy) -> Score:
        result = await run_program([sys.executable, "-I", str(AGENT), PROMPT.format(problem=example.text)], policy)
        correct = result.exit_code == 0 and last_answer(result.output) == example.answer
        return Score(reward=float(correct), metrics={"exit_code": float(result.exit_code)})

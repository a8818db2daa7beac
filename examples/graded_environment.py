"""An environment that runs what the policy wrote: a program that hangs, crashes or eats memory costs its rollout only.

    [environments.code]
    use = "graded_environment:Code"     # with examples/ on the worker's PYTHONPATH

`judge` runs in a grader's process, which is killed with all that it started when the time is over. That is a limit and
not a sandbox: the program has this user's rights.
"""

import re
import subprocess
import sys
from dataclasses import dataclass

from penstock.environments import Policy, graded

PROMPT = "Write a Python function `f(n)` that returns {task}. Put it between ``` and ```."
BLOCK = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Task:
    text: str
    tests: dict[str, str]
    """arguments, and what the function must return"""


class Code:
    examples = (
        Task(text="the n-th prime, counted from 1", tests={"1": "2", "2": "3", "10": "29", "100": "541"}),
        Task(text="the sum of the digits of n", tests={"0": "0", "7": "7", "1999": "28"}),
    )

    async def rollout(self, example: Task, policy: Policy) -> float:
        reply = await policy.chat([{"role": "user", "content": PROMPT.format(task=example.text)}])
        blocks = BLOCK.findall(reply.content)
        return await graded(judge, blocks[-1], example.tests, timeout_s=5) if blocks else 0.0


def judge(program: str, tests: dict[str, str]) -> float:
    """The share of tests that pass. The program never sees what is expected, and only its output counts."""
    passed = 0
    for argument, expected in tests.items():
        command = [sys.executable, "-I", "-c", f"{program}\nprint(f({argument}))"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        passed += ended.returncode == 0 and ended.stdout.strip() == expected
    return passed / len(tests)

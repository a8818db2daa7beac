"""An environment that runs the code the policy wrote. If it hangs, crashes or exhausts memory, only its rollout fails.

    [environments.code]
    use = "graded_environment:Code"     # with examples/ on the worker's PYTHONPATH

`judge` runs in a grader process, which is killed with its children at the time limit. This is not a sandbox: the code
runs with this user's permissions.
"""

import re
import subprocess
import sys
from dataclasses import dataclass

from headpond.environments import Policy, graded

PROMPT = "Write a Python function `f(n)` that returns {task}. Put it between ``` and ```."
BLOCK = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Task:
    text: str
    tests: dict[str, str]
    """argument -> expected result"""


class Code:
    examples = (
        Task(text="the n-th prime, counted from 1", tests={"1": "2", "2": "3", "10": "29", "100": "541"}),
        Task(text="the sum of the digits of n", tests={"0": "0", "7": "7", "1999": "28"}),
    )

    async def rollout(self, example: Task, policy: Policy) -> float:
        completion = await policy.chat([{"role": "user", "content": PROMPT.format(task=example.text)}])
        blocks = BLOCK.findall(completion.content)
        return await graded(judge, blocks[-1], example.tests, timeout_s=5) if blocks else 0.0


def judge(program: str, tests: dict[str, str]) -> float:
    """The fraction of tests that pass. Only the output counts; the program never sees the expected results."""
    passed = 0
    for argument, expected in tests.items():
        command = [sys.executable, "-I", "-c", f"{program}\nprint(f({argument}))"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        passed += result.returncode == 0 and result.stdout.strip() == expected
    return passed / len(tests)

"""An environment: examples, and how one of them is played and scored."""

import re

from headpond.environments import Policy


class Sums:
    examples = [(a, b) for a in range(10, 50) for b in range(10, 50)]  # noqa: RUF012 - never changed

    async def rollout(self, example: tuple[int, int], policy: Policy) -> float:
        a, b = example
        question = f"What is {a} + {b}? End with a line `Answer: N`."
        completion = await policy.chat([{"role": "user", "content": question}])
        answer = re.search(r"Answer: (\d{1,9})$", completion.content)
        return 1 / (1 + abs(int(answer[1]) - a - b)) if answer else 0.0  # the reward: 1 if right, 1/2 if off by one

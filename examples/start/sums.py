"""An environment: examples, and how one of them is played and scored."""

from penstock.environments import Policy


class Sums:
    examples = [(a, b) for a in range(10, 50) for b in range(10, 50)]  # noqa: RUF012 - never changed

    async def rollout(self, example: tuple[int, int], policy: Policy) -> float:
        a, b = example
        question = f"What is {a} + {b}? End with a line `Answer: N`."
        completion = await policy.chat([{"role": "user", "content": question}])
        return float(completion.content.endswith(f"Answer: {a + b}"))  # the reward

"""An environment with tools: the policy looks up facts, several in one turn if it wants, then answers.

    [environments.atlas]
    use = "tool_environment:Atlas"     # with examples/ on the worker's PYTHONPATH

Invalid calls and timeouts are returned to the policy as error messages.
"""

import itertools

from headpond.environments import Message, Policy, Score, Tools, tool

POPULATIONS = {"France": 68, "Japan": 124, "Kenya": 55, "Peru": 34}
"""in millions"""
TURNS = 4


@tool(timeout_s=2.0)
async def population(country: str) -> int:
    """How many millions of people live in a country."""
    if country not in POPULATIONS:
        raise ValueError(f"the atlas has no {country}: it has {', '.join(POPULATIONS)}")
    return POPULATIONS[country]


class Atlas:
    examples = tuple(itertools.combinations(POPULATIONS, 2))

    async def rollout(self, example: tuple[str, str], policy: Policy) -> Score:
        one, other = example
        question = f"Where do more people live, in {one} or in {other}? Look it up, then name the country."
        messages: list[Message] = [{"role": "user", "content": question}]
        tools, answer = Tools(population), ""
        for _ in range(TURNS):
            completion = await policy.chat(messages, tools=tools.schemas)
            if not completion.tool_calls:
                answer = completion.content.strip(" .")
                break
            messages += [completion.message, *await tools.answer(completion)]
        correct = max(example, key=lambda country: POPULATIONS[country])
        return Score(reward=float(answer == correct), metrics={"calls": tools.calls, "wrong_calls": tools.errors})

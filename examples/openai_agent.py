"""An environment whose agent is written with the `openai` package and given a URL and a key.

    [environments.trivia]
    use = "openai_agent:Trivia"     # with examples/ on the worker's PYTHONPATH

Every request to that URL is recorded token by token.
"""

from typing import Any

from openai import AsyncOpenAI

from headpond.environments import AgentPolicy

LOOK_UP: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a country in the atlas.",
        "parameters": {"type": "object", "properties": {"country": {"type": "string"}}, "required": ["country"]},
    },
}
ATLAS = {"France": "Paris", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima"}


class Trivia:
    external_agent = True
    examples = sorted(ATLAS)

    async def rollout(self, example: str, policy: AgentPolicy) -> float:
        messages: list[Any] = [{"role": "user", "content": f"What is the capital of {example}? You have an atlas."}]
        # The same tools in every request: a prompt with a different beginning starts a new sample.
        request: dict[str, Any] = {"model": policy.model, "messages": messages, "tools": [LOOK_UP]}
        async with AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key, max_retries=2) as client:
            message = (await client.chat.completions.create(**request)).choices[0].message
            calls = message.tool_calls or []
            messages.append(message.model_dump(exclude_none=True))
            messages.extend({"role": "tool", "tool_call_id": call.id, "content": ATLAS[example]} for call in calls)
            messages.append({"role": "user", "content": "Say it in one word."})
            answer = ""
            async for chunk in await client.chat.completions.create(**request, stream=True):
                answer += chunk.choices[0].delta.content or "" if chunk.choices else ""
        # A small length penalty, so that rewards differ even between wrong answers.
        return float(ATLAS[example] in answer) - len(answer) / 10_000

"""Environments for real models, which workers load as `tests.support.vllm_environments:NAME`."""

from typing import Any

from headpond.environments.protocol import Policy, Score
from headpond.environments.tools import Tools, tool
from headpond.turn import Message


@tool
async def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


class Dialogue:
    """Questions one after the other, whatever the policy says. `sampling` are fields of every request."""

    def __init__(
        self,
        *,
        turns: int = 1,
        text: str = "Say something, {example}.",
        sampling: dict[str, Any] | None = None,
        tools: bool = False,
    ) -> None:
        self.examples = range(1, 100)
        self._turns, self._text, self._sampling, self._tools = turns, text, sampling or {}, tools

    async def rollout(self, example: int, policy: Policy) -> Score:
        messages: list[Message] = []
        tokens, tools = 0, Tools(add) if self._tools else None
        for turn in range(self._turns):
            if not messages or messages[-1]["role"] != "tool":
                question = self._text.format(example=example + turn, other=2 * example)
                messages.append({"role": "user", "content": question})
            completion = await policy.chat(messages, tools=tools.schemas if tools else None, **self._sampling)
            messages.append(completion.message)
            tokens += len(completion.token_ids)
            if tools and completion.tool_calls:
                messages += await tools.answer(completion)
        calls = tools.calls if tools else 0
        return Score(reward=float(tokens % 2), metrics={"calls": float(calls)})


class Fifths:
    """The reward is the share of sampled tokens whose id is divisible by 5: about 0.2 before the policy has learned.
    Every token counts, so that a few steps suffice, but not the one that ends the message: it cannot be avoided."""

    examples = range(64)

    async def rollout(self, example: int, policy: Policy) -> float:
        completion = await policy.chat([{"role": "user", "content": f"Say something, {example}."}])
        said = completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids
        return float((said % 5 == 0).mean()) if len(said) else 0.0

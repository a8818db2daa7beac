"""An environment that only makes bytes: every turn the user says as much as before, and the policy answers."""

from typing import Annotated

from pydantic import Field

from penstock.environments.protocol import Message, Policy

EXAMPLES = 1_000
TEXT = "Go on from where you were, and say why. "


class Talk:
    def __init__(self, *, turns: Annotated[int, Field(ge=1)], said: Annotated[int, Field(ge=1)]) -> None:
        """`said` characters a turn: as many tokens, in front of the engine that answers here."""
        self.examples = range(EXAMPLES)
        self._turns = turns
        self._text = (TEXT * (said // len(TEXT) + 1))[:said]

    async def rollout(self, example: int, policy: Policy) -> float:
        messages: list[Message] = []
        reward = 0.0
        for _ in range(self._turns):
            messages.append({"role": "user", "content": f"{example}: {self._text}"})
            reply = await policy.chat(messages)
            messages.append(reply.message)
            reward += reply.content.count("e")
        return reward

"""An environment that only makes bytes: every turn the user says as much as before, and the policy answers."""

from typing import Annotated

from pydantic import Field

from penstock.environments.protocol import Message, Policy

EXAMPLES = 1_000
TEXT = "Go on from where you were, and say why. "


def said_by_the_user(example: int, characters: int) -> str:
    text = (TEXT * (characters // len(TEXT) + 1))[:characters]
    return f"{example}: {text}"


class Talk:
    def __init__(self, *, turns: Annotated[int, Field(ge=1)], said: Annotated[int, Field(ge=1)]) -> None:
        """`said` characters a turn: as many tokens, in front of the engine that answers here."""
        self.examples = range(EXAMPLES)
        self._turns = turns
        self._said = said

    async def rollout(self, example: int, policy: Policy) -> float:
        messages: list[Message] = []
        reward = 0.0
        for _ in range(self._turns):
            messages.append({"role": "user", "content": said_by_the_user(example, self._said)})
            reply = await policy.chat(messages)
            messages.append(reply.message)
            reward += reply.content.count("e")
        return reward

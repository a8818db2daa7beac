"""Several turns with tool calls: find the number in every box. One turn may guess at several boxes at once.

The reward is the share of boxes whose number was found.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from penstock.environments.protocol import Policy, ToolCall
from penstock.environments.scores import Score
from penstock.errors import PolicyFailure

SYSTEM = "You play a guessing game. Call the tool `guess`; you may call it for several boxes in one turn."
PROMPT = (
    "The boxes {boxes} each hold a whole number from 1 to {largest}. Find every number. "
    "You have {turns} turns. Say DONE when you have found them all."
)
TOOL = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess the number in a box. Answers `too low`, `too high` or `correct`.",
        "parameters": {
            "type": "object",
            "properties": {"box": {"type": "string"}, "number": {"type": "integer"}},
            "required": ["box", "number"],
        },
    },
}
TOO_LOW, TOO_HIGH, CORRECT = "too low", "too high", "correct"


@dataclass(kw_only=True)
class Game:
    secrets: Mapping[str, int]
    found: set[str] = field(default_factory=set[str])
    guesses: int = 0
    invalid: int = 0

    def answer(self, call: ToolCall) -> str:
        """What the tool says; what the policy did wrong is told to it, so that it can do better."""
        self.guesses += 1
        try:
            arguments = call.arguments()
        except PolicyFailure as error:
            return self._invalid(str(error))
        box, number = arguments.get("box"), arguments.get("number")
        if call.name != "guess" or not isinstance(box, str) or type(number) is not int:
            return self._invalid("call guess with a box (string) and a number (integer)")
        if box not in self.secrets:
            return self._invalid(f"there is no box {box}; there are {', '.join(self.secrets)}")
        if number == self.secrets[box]:
            self.found.add(box)
            return CORRECT
        return TOO_LOW if number < self.secrets[box] else TOO_HIGH

    @property
    def over(self) -> bool:
        return len(self.found) == len(self.secrets)

    def _invalid(self, why: str) -> str:
        self.invalid += 1
        return f"error: {why}"


class Guess:
    def __init__(
        self,
        *,
        size: Annotated[int, Field(ge=1)] = 1_000,
        boxes: Annotated[int, Field(ge=1, le=26)] = 3,
        largest: Annotated[int, Field(ge=1)] = 100,
        turns: Annotated[int, Field(ge=1)] = 8,
        seed: int = 0,
    ) -> None:
        self.examples = [hidden_numbers(boxes=boxes, largest=largest, seed=f"{seed}/{index}") for index in range(size)]
        self._largest, self._turns = largest, turns

    async def rollout(self, example: Mapping[str, int], policy: Policy) -> Score:
        game, turns = Game(secrets=example), 0
        prompt = PROMPT.format(boxes=", ".join(example), largest=self._largest, turns=self._turns)
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": prompt},
        ]
        while turns < self._turns and not game.over:
            reply = await policy.chat(messages, tools=[TOOL])
            turns += 1
            if not reply.tool_calls:
                break
            messages.append(reply.message)
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": game.answer(call)} for call in reply.tool_calls
            ]
        return Score(
            reward=len(game.found) / len(example),
            metrics={"solved": float(game.over), "guesses": game.guesses, "invalid_calls": game.invalid},
        )


def hidden_numbers(*, boxes: int, largest: int, seed: str) -> dict[str, int]:
    chosen = random.Random(seed)  # noqa: S311  the same games in every process, for ever
    return {chr(ord("A") + box): chosen.randint(1, largest) for box in range(boxes)}

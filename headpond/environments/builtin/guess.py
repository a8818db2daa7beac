"""Several turns with tool calls: guess the number in every box. One turn may guess for several boxes.

The reward is the fraction of boxes whose number was guessed.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from headpond.environments.protocol import Policy, Score
from headpond.environments.tools import Tools, tool
from headpond.turn import Message

SYSTEM = "You play a guessing game. Call the tool `guess`; you may call it for several boxes in one turn."
PROMPT = (
    "The boxes {boxes} each hold a whole number from 1 to {largest}. Find every number. "
    "You have {turns} turns. Say DONE when you have found them all."
)
TOO_LOW, TOO_HIGH, CORRECT = "too low", "too high", "correct"


@dataclass(kw_only=True)
class Game:
    secrets: Mapping[str, int]
    guessed: set[str] = field(default_factory=set[str])

    @tool
    async def guess(self, box: str, number: int) -> str:
        """Guess the number in a box. Answers `too low`, `too high` or `correct`."""
        if box not in self.secrets:
            raise ValueError(f"there is no box {box}; there are {', '.join(self.secrets)}")
        if number == self.secrets[box]:
            self.guessed.add(box)
            return CORRECT
        return TOO_LOW if number < self.secrets[box] else TOO_HIGH

    @property
    def over(self) -> bool:
        return len(self.guessed) == len(self.secrets)


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
        tools = Tools(game.guess)
        prompt = PROMPT.format(boxes=", ".join(example), largest=self._largest, turns=self._turns)
        messages: list[Message] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": prompt},
        ]
        while turns < self._turns and not game.over:
            completion = await policy.chat(messages, tools=tools.schemas)
            turns += 1
            if not completion.tool_calls:
                break
            messages += [completion.message, *await tools.answer(completion)]
        return Score(
            reward=len(game.guessed) / len(example),
            metrics={"solved": float(game.over), "guesses": tools.calls, "invalid_calls": tools.errors},
        )


def hidden_numbers(*, boxes: int, largest: int, seed: str) -> dict[str, int]:
    generator = random.Random(seed)  # noqa: S311  the same games in every process
    return {chr(ord("A") + box): generator.randint(1, largest) for box in range(boxes)}

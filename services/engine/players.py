"""A policy without a model: answers the built-in environments, well or badly as it is told. Other questions it leaves.

The texts that it knows them by are those of `docs/environments.md`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import orjson

from penstock.renderers.bytes_chatml import Message
from services.engine.draws import Draws

NUMBER = r"[1-9]\d{0,8}"
PROBLEM = re.compile(rf"What is ((?:{NUMBER} [-+*] ){{0,99}}{NUMBER})\?")
MULTIPLE = re.compile(rf"whole number from 1 to ({NUMBER}) that is divisible by ({NUMBER})\.")
BOXES = re.compile(rf"The boxes (.+) each hold a whole number from 1 to ({NUMBER})\.")


@dataclass(frozen=True, kw_only=True)
class Said:
    text: str
    calls: Sequence[Message] = field(default_factory=list[Message])


def play(messages: Sequence[Message], draws: Draws, skill: float) -> Said | None:
    """None when nobody here knows the question."""
    return next((said for player in (add, name_multiple, guess) if (said := player(messages, draws, skill))), None)


def add(messages: Sequence[Message], draws: Draws, skill: float) -> Said | None:
    if (asked := PROBLEM.search(_question(messages))) is None:
        return None
    result = sum(map(_product, asked[1].replace(" - ", " + -").split(" + ")))
    error = 0 if draws.uniform("skill") < skill else draws.integer("error", 1, 9)
    return Said(text=f"\nAnswer: {result + error}")


def _product(text: str) -> int:
    sign, product = (-1 if text.startswith("-") else 1), 1
    for factor in text.lstrip("-").split(" * "):
        product *= int(factor)
    return sign * product


def name_multiple(messages: Sequence[Message], draws: Draws, skill: float) -> Said | None:
    if (asked := MULTIPLE.search(_question(messages))) is None:
        return None
    largest, divisor = int(asked[1]), int(asked[2])
    well = draws.uniform("skill") < skill
    number = divisor * draws.integer("number", 1, max(1, largest // divisor)) if well else divisor
    return Said(text=f"\nAnswer: {number}")


def guess(messages: Sequence[Message], draws: Draws, skill: float) -> Said | None:
    """Halves the range of every box; where it plays badly it tries the lowest number that is left."""
    if (asked := BOXES.search(_question(messages))) is None:
        return None
    ranges = {box: (1, int(asked[2])) for box in asked[1].split(", ")}
    for box, number, answer in _answered(messages):
        low, high = ranges.get(box, (1, 0))
        ranges[box] = {"too low": (number + 1, high), "too high": (low, number - 1)}.get(answer, (1, 0))
    calls: list[Message] = []
    for box, (low, high) in ranges.items():
        if low <= high:
            number = (low + high) // 2 if draws.uniform(f"skill {box}") < skill else low
            arguments = orjson.dumps({"box": box, "number": number}).decode()
            calls.append({"type": "function", "function": {"name": "guess", "arguments": arguments}})
    return Said(text="" if calls else "DONE", calls=calls)


def _answered(messages: Sequence[Message]) -> Iterator[tuple[str, int, str]]:
    """The guesses that were made, with the tool's words."""
    calls = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", [])]
    answers = [message["content"] for message in messages if message["role"] == "tool"]
    for call, answer in zip(calls, answers, strict=False):
        match orjson.loads(call):
            case {"box": str(box), "number": int(number)}:
                yield box, number, answer
            case _:
                pass


def _question(messages: Sequence[Message]) -> str:
    """What the user said first."""
    return next((message["content"] for message in messages if message["role"] == "user"), "")

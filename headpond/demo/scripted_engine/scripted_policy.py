"""A policy without a model: answers the questions of the built-in environments with a given share of good answers.

It recognizes questions by the texts in `docs/environments.md`, and plays the steps that a user's message lists.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import orjson

from headpond.demo.scripted_engine.draws import Draws
from headpond.turn import Message

NUMBER = r"[1-9]\d{0,8}"
PROBLEM = re.compile(rf"What is ((?:{NUMBER} [-+*] ){{0,99}}{NUMBER})\?")
MULTIPLE = re.compile(rf"whole number from 1 to ({NUMBER}) that is divisible by ({NUMBER})\.")
BOXES = re.compile(rf"The boxes (.+) each hold a whole number from 1 to ({NUMBER})\.")
STEPS = "Steps: ["


@dataclass(frozen=True, kw_only=True)
class ScriptedAnswer:
    text: str
    calls: Sequence[Message] = field(default_factory=list[Message])
    thoughts: str = ""

    @property
    def message(self) -> Message:
        return {"content": self.text, "reasoning_content": self.thoughts, "tool_calls": self.calls}


def scripted_answer(messages: Sequence[Message], draws: Draws, skill: float) -> ScriptedAnswer | None:
    """None if the question is not one of a built-in environment."""
    players = (play_steps, add, name_multiple, guess_boxes)
    return next((answer for player in players if (answer := player(messages, draws, skill))), None)


def add(messages: Sequence[Message], draws: Draws, skill: float) -> ScriptedAnswer | None:
    if (question := PROBLEM.search(_question(messages))) is None:
        return None
    result = sum(map(_product, question[1].replace(" - ", " + -").split(" + ")))
    error = 0 if draws.uniform("skill") < skill else draws.integer("error", 1, 9)
    return ScriptedAnswer(text=f"\nAnswer: {result + error}")


def _product(text: str) -> int:
    sign, product = (-1 if text.startswith("-") else 1), 1
    for factor in text.lstrip("-").split(" * "):
        product *= int(factor)
    return sign * product


def name_multiple(messages: Sequence[Message], draws: Draws, skill: float) -> ScriptedAnswer | None:
    if (question := MULTIPLE.search(_question(messages))) is None:
        return None
    largest, divisor = int(question[1]), int(question[2])
    good = draws.uniform("skill") < skill
    number = divisor * draws.integer("number", 1, max(1, largest // divisor)) if good else divisor
    return ScriptedAnswer(text=f"\nAnswer: {number}")


def guess_boxes(messages: Sequence[Message], draws: Draws, skill: float) -> ScriptedAnswer | None:
    """A good guess halves the range of a box; a bad one is the lowest number left."""
    if (question := BOXES.search(_question(messages))) is None:
        return None
    ranges = {box: (1, int(question[2])) for box in question[1].split(", ")}
    for box, number, result in _guesses(messages):
        low, high = ranges.get(box, (1, 0))
        ranges[box] = {"too low": (number + 1, high), "too high": (low, number - 1)}.get(result, (1, 0))
    calls: list[Message] = []
    for box, (low, high) in ranges.items():
        if low <= high:
            number = (low + high) // 2 if draws.uniform(f"skill {box}") < skill else low
            arguments = orjson.dumps({"box": box, "number": number}).decode()
            calls.append({"type": "function", "function": {"name": "guess", "arguments": arguments}})
    return ScriptedAnswer(text="" if calls else "DONE", calls=calls)


def play_steps(messages: Sequence[Message], draws: Draws, skill: float) -> ScriptedAnswer | None:
    """The next of the steps that a user's message lists as JSON: `Steps: [{"think": TEXT, "say": TEXT, "call": [[TOOL,
    ARGUMENTS], ...]}, ...]`. After the last one the answer is `Done.`"""
    listed = [at for at, message in enumerate(messages) if message["role"] == "user" and STEPS in message["content"]]
    if not listed:
        return None
    text = messages[listed[-1]]["content"]
    try:
        steps, _ = json.JSONDecoder().raw_decode(text, text.index(STEPS) + len(STEPS) - 1)
    except (ValueError, RecursionError):
        return None
    done = sum(message["role"] == "assistant" for message in messages[listed[-1] :])
    match steps[done : done + 1]:
        case [dict(step)]:
            return _step(cast("Message", step))
        case _:
            return ScriptedAnswer(text="Done.")


def _step(step: Message) -> ScriptedAnswer:
    calls: list[Message] = []
    for call in step.get("call") or []:
        match call:
            case [str(name), dict(arguments)]:
                function = {"name": name, "arguments": json.dumps(arguments)}
                calls.append({"type": "function", "function": function})
            case _:
                pass
    return ScriptedAnswer(text=str(step.get("say") or ""), thoughts=str(step.get("think") or ""), calls=calls)


def _guesses(messages: Sequence[Message]) -> Iterator[tuple[str, int, str]]:
    """Earlier guesses with the tool's results."""
    calls = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", [])]
    results = [message["content"] for message in messages if message["role"] == "tool"]
    for call, result in zip(calls, results, strict=False):
        match orjson.loads(call):
            case {"box": str(box), "number": int(number)}:
                yield box, number, result
            case _:
                pass


def _question(messages: Sequence[Message]) -> str:
    """The first user message."""
    return next((message["content"] for message in messages if message["role"] == "user"), "")

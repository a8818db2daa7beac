"""The scripted policy on the texts of the built-in environments."""

import json
from typing import Any

import pytest

from headpond.demo.scripted_engine.draws import Draws
from headpond.demo.scripted_engine.scripted_policy import ScriptedAnswer, play_steps, scripted_answer

ARITHMETIC = "What is {}? Think it through, then end with a line `Answer: N`, where N is a whole number."
DISTINCT = (
    "Name a whole number from 1 to {} that is divisible by {}. Others are asked the same: "
    "choose one that they do not choose. End with a line `Answer: N`."
)
GUESS = (
    "The boxes {} each hold a whole number from 1 to {}. Find every number. "
    "You have 8 turns. Say DONE when you have found them all."
)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answers(question: str, skill: float, seeds: int = 200) -> list[int]:
    scripted = [scripted_answer([user(question)], Draws(b"%d" % seed), skill) for seed in range(seeds)]
    return [int(each.text.removeprefix("\nAnswer: ")) for each in scripted if each]


@pytest.mark.parametrize(
    ("problem", "result"), [("7", 7), ("12 + 3 * 4 - 5", 19), ("2 * 3 - 4 * 5 - 1", -15), ("1 - 2 + 3 * 2", 5)]
)
def test_the_share_of_right_sums_is_the_skill(problem: str, result: int) -> None:
    question = ARITHMETIC.format(problem)
    assert set(answers(question, skill=1)) == {result}
    assert result not in answers(question, skill=0)
    assert answers(question, skill=0.3).count(result) == pytest.approx(60, abs=20)


def test_good_multiples_are_spread_and_bad_ones_are_equal() -> None:
    question = DISTINCT.format(100, 7)
    assert set(answers(question, skill=1)) == set(range(7, 101, 7))
    assert set(answers(question, skill=0)) == {7}


@pytest.mark.parametrize("skill", [0.0, 1.0])
def test_guessing_finds_every_number(skill: float) -> None:
    hidden, turns = {"A": 1, "B": 100, "C": 63}, 0
    messages = [user(GUESS.format(", ".join(hidden), 100))]
    while (answer := scripted_answer(messages, Draws(b"%d" % turns), skill)) and answer.calls:
        turns += 1
        messages.append({"role": "assistant", "content": answer.text, "tool_calls": answer.calls})
        for call in answer.calls:
            guess = json.loads(call["function"]["arguments"])
            number = hidden[guess["box"]]
            word = "correct" if guess["number"] == number else "too low" if guess["number"] < number else "too high"
            messages.append({"role": "tool", "content": word})
    assert answer is not None
    assert answer.text == "DONE"
    assert turns == (7 if skill else 100)


@pytest.mark.parametrize(
    "question",
    [
        "",
        "What is love?",
        "What is 1 + ?",
        ARITHMETIC.format("9" * 5000),
        ARITHMETIC.format(" * ".join(["999999999"] * 500)),
        DISTINCT.format(100, 0),
    ],
)
def test_other_questions_have_no_scripted_answer(question: str) -> None:
    assert scripted_answer([user(question)], Draws(b""), 1) is None
    assert scripted_answer([{"role": "system", "content": ARITHMETIC.format("1 + 1")}], Draws(b""), 1) is None


def test_malformed_tool_calls_in_the_history_are_ignored() -> None:
    calls = [
        {"function": {"name": "guess", "arguments": text}}
        for text in ("7", "[]", '{"box":3}', '{"box":"Z","number":1}')
    ]
    messages = [user(GUESS.format("A", 3)), {"role": "assistant", "content": "", "tool_calls": calls}]
    answer = scripted_answer([*messages, *[{"role": "tool", "content": "error: no"}] * 4], Draws(b""), 1)
    assert answer is not None
    assert [json.loads(call["function"]["arguments"]) for call in answer.calls] == [{"box": "A", "number": 2}]


STEPS = (
    'Go. Steps: [{"think": "hm", "say": "I look.", "call": [["look", {"at": 1}], ["look", {}], 3]}, {"say": "End."}] x'
)


def test_listed_steps_are_played_one_an_answer() -> None:
    draws = Draws(b"")
    messages: list[Any] = [{"role": "system", "content": ""}, {"role": "user", "content": STEPS}]
    first = play_steps(messages, draws, 1.0)
    assert first
    functions = [call["function"] for call in first.calls]
    assert (first.thoughts, first.text, functions) == (
        "hm",
        "I look.",
        [{"name": "look", "arguments": '{"at": 1}'}, {"name": "look", "arguments": "{}"}],
    )
    for expected in ("End.", "Done.", "Done."):
        messages += [{"role": "assistant", "content": "?"}, {"role": "tool", "content": "?"}]
        assert play_steps(messages, draws, 1.0) == ScriptedAnswer(text=expected)


@pytest.mark.parametrize("text", ["Steps: [", "Steps: [}", "no steps", "Steps: " + "[" * 100_000])
def test_what_lists_no_steps_is_not_played(text: str) -> None:
    assert play_steps([{"role": "user", "content": text}], Draws(b""), 1.0) is None

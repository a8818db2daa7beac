import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.asking import run
from support.upstream import calling, tool_call

from penstock.environments import Completion, Message, Played, Score
from penstock.environments.arithmetic import Arithmetic, Problem, last_answer
from penstock.environments.distinct import Distinct
from penstock.environments.guess import Guess


class Scripted:
    """A policy that says what a function of the messages says."""

    def __init__(self, says: Callable[[list[Message]], str | Message]) -> None:
        self._says = says
        self.asked: list[tuple[list[Message], Any]] = []

    async def chat(self, messages: Sequence[Message], *, tools: Any = None, **_: Any) -> Completion:
        self.asked.append((list(messages), tools))
        said = self._says(list(messages))
        message = {"role": "assistant", "content": said} if isinstance(said, str) else said
        return Completion(message=message, finish_reason="stop", truncated=False)


def played(answer: str, *, error: str | None = None) -> Played:
    conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    return Played(score=Score(reward=0.0), error=error, turns=1, completion_tokens=1, conversations=[conversation])


def test_problems_are_what_they_say_and_always_the_same() -> None:
    environment = Arithmetic(size=200, terms=4, largest=9)
    for problem in environment.examples:
        assert eval(problem.text) == problem.answer
    assert environment.examples == Arithmetic(size=200, terms=4, largest=9).examples
    assert environment.examples != Arithmetic(size=200, terms=4, largest=9, seed=1).examples
    assert Arithmetic(size=1).examples[0] == Problem(text="16 * 13 - 13 * 19 + 5", answer=-34)


@pytest.mark.parametrize(
    ("said", "reward", "answered"),
    [
        ("2 * 3 = 6\nAnswer: 7", 1.0, 1.0),
        ("Answer: 8, no, Answer: 7", 1.0, 1.0),
        ("Answer: 7, no, Answer: 8", 0.0, 1.0),
        ("seven", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_arithmetic_rewards_the_last_answer(said: str, reward: float, answered: float) -> None:
    async def main() -> None:
        policy = Scripted(lambda _: said)
        score = await Arithmetic(size=1).rollout(Problem(text="1 + 2 * 3", answer=7), policy)
        assert score == Score(reward=reward, metrics={"answered": answered})
        assert policy.asked == [
            (
                [
                    {
                        "role": "user",
                        "content": "What is 1 + 2 * 3? Think it through, then end with a line `Answer: N`, "
                        "where N is a whole number.",
                    }
                ],
                None,
            )
        ]

    run(main)


def test_an_endless_number_is_no_answer() -> None:
    assert last_answer("Answer: " + "9" * 10_000) is None
    assert last_answer("Answer: -12") == -12


def halving(messages: list[Message]) -> str | Message:
    """Finds every box at once, by halving."""
    ranges = {"A": (1, 100), "B": (1, 100), "C": (1, 100)}
    asked = [call for message in messages for call in message.get("tool_calls") or []]
    told = [message["content"] for message in messages if message["role"] == "tool"]
    for call, answer in zip(asked, told, strict=True):
        arguments = json.loads(call["function"]["arguments"])
        box, number = arguments["box"], arguments["number"]
        low, high = ranges[box]
        ranges[box] = {"too low": (number + 1, high), "too high": (low, number - 1), "correct": (1, 0)}[answer]
    left = {box: (low + high) // 2 for box, (low, high) in ranges.items() if low <= high}
    calls = [tool_call("guess", {"box": box, "number": number}, id=box) for box, number in left.items()]
    return calling(*calls) if calls else "DONE"


def test_guess_is_played_with_several_calls_a_turn() -> None:
    async def main() -> None:
        environment = Guess(size=20)
        for example in environment.examples:
            policy = Scripted(halving)
            score = await environment.rollout(example, policy)
            assert (score.reward, score.metrics["solved"], score.metrics["invalid_calls"]) == (1.0, 1.0, 0.0)
            assert len(policy.asked) <= 7
            messages, tools = policy.asked[1]
            assert tools[0]["function"]["name"] == "guess"
            assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool", "tool"]
            assert [message["tool_call_id"] for message in messages[3:]] == ["A", "B", "C"]

    run(main)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (tool_call("guess", {"box": "A", "number": 5}), "correct"),
        (tool_call("guess", {"box": "A", "number": 4}), "too low"),
        (tool_call("guess", {"box": "A", "number": 6}), "too high"),
        (tool_call("guess", {"box": "Z", "number": 6}), "error: there is no box Z; there are A, B"),
        (tool_call("guess", {"box": "A", "number": "6"}), "error: guess: number: Input should be a valid integer"),
        (tool_call("guess", {"box": "A", "number": True}), "error: guess: number: Input should be a valid integer"),
        (tool_call("guess", {}), "error: guess: box: Field required; number: Field required"),
        (tool_call("open", {"box": "A", "number": 5}), "error: there is no tool open; there are guess"),
        (tool_call("guess", "box A"), "error: guess: Invalid JSON: expected value at line 1"),
        (tool_call("guess", [1]), "error: guess: Input should be an object"),
    ],
)
def test_guess_tells_the_policy_what_it_did_wrong(call: Message, told: str) -> None:
    async def main() -> None:
        policy = Scripted(lambda messages: calling(call) if len(messages) < 4 else "DONE")
        score = await Guess(size=1).rollout({"A": 5, "B": 7}, policy)
        assert policy.asked[1][0][-1]["content"].startswith(told)
        assert score.reward == (0.5 if told == "correct" else 0.0)
        assert score.metrics["invalid_calls"] == told.startswith("error")

    run(main)


def test_guess_ends_after_its_turns() -> None:
    async def main() -> None:
        policy = Scripted(lambda _: calling(tool_call("guess", {"box": "A", "number": 1})))
        score = await Guess(size=1, turns=3).rollout({"A": 5}, policy)
        assert (len(policy.asked), score.reward, score.metrics["guesses"]) == (3, 0.0, 3.0)

    run(main)


def test_distinct_is_worth_less_the_more_say_the_same() -> None:
    environment = Distinct(largest=100)
    assert list(environment.examples) == list(range(2, 12))
    answers = ["Answer: 14", "Answer: 21", "Answer: 14", "Answer: 15", "14", "Answer: 707", "Answer: 0"]
    group = [*map(played, answers), played("Answer: 28", error="timeout")]
    assert environment.score_group(7, group) == [0.5, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_distinct_alone_is_right_or_wrong() -> None:
    async def main() -> None:
        for said, reward in (("Answer: 21", 1.0), ("Answer: 22", 0.0)):
            assert (await Distinct().rollout(7, Scripted(lambda _, said=said: said))).reward == reward

    run(main)

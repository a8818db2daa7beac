import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.engine_clients import run
from support.upstream import calling, tool_call

from headpond.environments import Completion, Message, PlayedRollout, Score
from headpond.environments.builtin.arithmetic import Arithmetic, Problem, last_answer
from headpond.environments.builtin.distinct import Distinct
from headpond.environments.builtin.guess import Guess


class ScriptedPolicy:
    """A policy whose completions are a function of the messages."""

    def __init__(self, script: Callable[[list[Message]], str | Message]) -> None:
        self._script = script
        self.requests: list[tuple[list[Message], Any]] = []

    async def chat(self, messages: Sequence[Message], *, tools: Any = None, **_: Any) -> Completion:
        self.requests.append((list(messages), tools))
        answer = self._script(list(messages))
        message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
        return Completion(message=message, finish_reason="stop", truncated=False)


def played(answer: str, *, error: str | None = None) -> PlayedRollout:
    conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    return PlayedRollout(
        score=Score(reward=0.0), error=error, turns=1, completion_tokens=1, conversations=[conversation]
    )


def test_problems_have_correct_answers_and_depend_only_on_the_seed() -> None:
    environment = Arithmetic(size=200, terms=4, largest=9)
    for problem in environment.examples:
        assert eval(problem.text) == problem.answer
    assert environment.examples == Arithmetic(size=200, terms=4, largest=9).examples
    assert environment.examples != Arithmetic(size=200, terms=4, largest=9, seed=1).examples
    assert Arithmetic(size=1).examples[0] == Problem(text="16 * 13 - 13 * 19 + 5", answer=-34)


@pytest.mark.parametrize(
    ("text", "reward", "answered"),
    [
        ("2 * 3 = 6\nAnswer: 7", 1.0, 1.0),
        ("Answer: 8, no, Answer: 7", 1.0, 1.0),
        ("Answer: 7, no, Answer: 8", 0.0, 1.0),
        ("seven", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_arithmetic_rewards_the_last_answer(text: str, reward: float, answered: float) -> None:
    async def main() -> None:
        policy = ScriptedPolicy(lambda _: text)
        score = await Arithmetic(size=1).rollout(Problem(text="1 + 2 * 3", answer=7), policy)
        assert score == Score(reward=reward, metrics={"answered": answered})
        assert policy.requests == [
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


def test_a_very_long_number_is_not_an_answer() -> None:
    assert last_answer("Answer: " + "9" * 10_000) is None
    assert last_answer("Answer: -12") == -12


def bisection(messages: list[Message]) -> str | Message:
    """Searches all boxes at the same time, by bisection."""
    ranges = {"A": (1, 100), "B": (1, 100), "C": (1, 100)}
    calls = [call for message in messages for call in message.get("tool_calls") or []]
    results = [message["content"] for message in messages if message["role"] == "tool"]
    for call, result in zip(calls, results, strict=True):
        arguments = json.loads(call["function"]["arguments"])
        box, number = arguments["box"], arguments["number"]
        low, high = ranges[box]
        ranges[box] = {"too low": (number + 1, high), "too high": (low, number - 1), "correct": (1, 0)}[result]
    left = {box: (low + high) // 2 for box, (low, high) in ranges.items() if low <= high}
    guesses = [tool_call("guess", {"box": box, "number": number}, id=box) for box, number in left.items()]
    return calling(*guesses) if guesses else "DONE"


def test_guess_is_played_with_several_calls_per_turn() -> None:
    async def main() -> None:
        environment = Guess(size=20)
        for example in environment.examples:
            policy = ScriptedPolicy(bisection)
            score = await environment.rollout(example, policy)
            assert (score.reward, score.metrics["solved"], score.metrics["invalid_calls"]) == (1.0, 1.0, 0.0)
            assert len(policy.requests) <= 7
            messages, tools = policy.requests[1]
            assert tools[0]["function"]["name"] == "guess"
            assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool", "tool"]
            assert [message["tool_call_id"] for message in messages[3:]] == ["A", "B", "C"]

    run(main)


@pytest.mark.parametrize(
    ("call", "result"),
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
def test_guess_answers_a_call_with_its_result_or_its_error(call: Message, result: str) -> None:
    async def main() -> None:
        policy = ScriptedPolicy(lambda messages: calling(call) if len(messages) < 4 else "DONE")
        score = await Guess(size=1).rollout({"A": 5, "B": 7}, policy)
        assert policy.requests[1][0][-1]["content"].startswith(result)
        assert score.reward == (0.5 if result == "correct" else 0.0)
        assert score.metrics["invalid_calls"] == result.startswith("error")

    run(main)


def test_guess_ends_at_its_turn_limit() -> None:
    async def main() -> None:
        policy = ScriptedPolicy(lambda _: calling(tool_call("guess", {"box": "A", "number": 1})))
        score = await Guess(size=1, turns=3).rollout({"A": 5}, policy)
        assert (len(policy.requests), score.reward, score.metrics["guesses"]) == (3, 0.0, 3.0)

    run(main)


def test_distinct_divides_the_reward_among_rollouts_with_the_same_number() -> None:
    environment = Distinct(largest=100)
    assert list(environment.examples) == list(range(2, 12))
    answers = ["Answer: 14", "Answer: 21", "Answer: 14", "Answer: 15", "14", "Answer: 707", "Answer: 0"]
    group = [*map(played, answers), played("Answer: 28", error="timeout")]
    assert environment.score_group(7, group) == [0.5, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_distinct_rewards_a_single_rollout_for_a_valid_number() -> None:
    async def main() -> None:
        for text, reward in (("Answer: 21", 1.0), ("Answer: 22", 0.0)):
            assert (await Distinct().rollout(7, ScriptedPolicy(lambda _, text=text: text))).reward == reward

    run(main)

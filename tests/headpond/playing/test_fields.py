"""Fields for the trainer: what environments and engines give, and what is stored of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from support.engine_clients import attempt_of, files, loaded, run, stage_of
from support.stores import directory_store
from support.upstream import ReceivedRequest, Response, answer, serving, user

from headpond.config.engine import Policy
from headpond.environments import Score
from headpond.errors import PolicyFailure, StageError
from headpond.fields import TrainerField
from headpond.playing.rollout import play, score_group
from headpond.records.rollout import RolloutResult
from headpond.store.columns import Columns, read_columns

VALUE = TrainerField(name="value")
LEVEL = TrainerField(name="level", per="sample", dtype="i32", default=-1)
STEP = TrainerField(name="step", source="turn", default=-2)
ROLE = TrainerField(name="role", source="turn", per="sample", dtype="u8")
TOKENS = 12  # of prompt and completion of `one_turn`


class Plays:
    def __init__(self, rollout: Callable[[Any], Any]) -> None:
        self._rollout = rollout

    async def rollout(self, example: Any, policy: Any) -> Any:
        return await self._rollout(policy)


def hello(request: ReceivedRequest) -> Response:
    return Response(body=answer(request, "hello"))


def played(
    root: Path,
    rollout: Callable[[Any], Any],
    *fields: TrainerField,
    respond: Callable[[ReceivedRequest], Response] = hello,
    **more: Any,
) -> tuple[RolloutResult, Columns]:
    results: list[RolloutResult] = []

    async def main() -> None:
        with serving(respond) as server:
            async with stage_of(root, server.url, fields=fields, **more) as stage:
                results.append(await play(stage, loaded(Plays(rollout)), 0, attempt_of()))

    run(main)
    [result] = results
    assert result.columns
    return result, read_columns(directory_store(root), result.columns)


def test_values_of_scores_and_turns_are_stored_at_their_positions(tmp_path: Path) -> None:
    async def two_agents(policy: Any) -> Score:
        messages = [user("first")]
        completion = await policy.chat(messages, agent="a")
        completion.fields["step"] = 10 * np.arange(completion.token_ids.size)
        completion.fields["role"] = 1
        messages += [completion.message, user("second")]
        other = await policy.chat([user("other")], agent="b")
        completion = await policy.chat(messages, agent="a")
        completion.fields.update(step=7.5, role=2)
        assert other.fields == {}
        samples = policy.sample_ids()
        return Score(reward=1.0, columns={"value": np.concatenate(samples), "level": [4, 5]})

    _, columns = played(tmp_path, two_agents, VALUE, LEVEL, STEP, ROLE)
    turns = columns.turns
    assert turns.sample.tolist() == [0, 1, 0]
    assert columns.token_fields["value"].tolist() == columns.input_ids.tolist()
    assert columns.sample_fields["level"].tolist() == [4, 5]
    expected = np.full(columns.input_ids.size, -2.0)
    expected[turns.start[0] : turns.end[0]] = 10 * np.arange(turns.end[0] - turns.start[0])
    expected[turns.start[2] : turns.end[2]] = 7.5
    assert columns.token_fields["step"].tolist() == expected.tolist()
    assert columns.sample_fields["role"].tolist() == [2, 0], "of the sample's last turn with a value, else the default"
    dtypes = {name: array.dtype.name for name, array in {**columns.token_fields, **columns.sample_fields}.items()}
    assert dtypes == {"value": "float32", "step": "float32", "level": "int32", "role": "uint8"}


def test_one_number_stands_for_all_tokens_or_samples(tmp_path: Path) -> None:
    async def scores(policy: Any) -> Score:
        await policy.chat([user("hello")])
        return Score(reward=1.0, columns={"value": 0.25, "level": True})

    _, columns = played(tmp_path, scores, VALUE, LEVEL)
    assert columns.token_fields["value"].tolist() == [0.25] * TOKENS
    assert columns.sample_fields["level"].tolist() == [1]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"value": np.zeros(3)},
            r"batch.fields.value: Score.columns has an array of shape \(3,\), expected one number",
        ),
        ({"value": [[0.0] * TOKENS]}, r"has an array of shape \(1, 12\)"),
        ({"value": [[0.0], []]}, "has values that are not an array"),
        ({"value": [float("nan")] * TOKENS}, "batch.fields.value: Score.columns has NaN or infinite values"),
        ({"value": 1e300}, "has NaN or infinite values: they must be finite in f32"),
        ({"value": ["a"] * TOKENS}, "has values of type text: the field is declared as f32"),
        (
            {"level": [0.5]},
            "batch.fields.level: Score.columns has values of type float64: the field is declared as",
        ),
        ({"level": [2**40]}, "has values that i32 cannot hold"),
        ({"level": [1, 2]}, r"has an array of shape \(2,\), expected one number or 1"),
        (
            {"weight": 1.0},
            r"Score.columns has 'weight', which is not declared: add \[batch.fields.weight\] with",
        ),
        (
            {"step": 1.0},
            r"Score.columns has 'step', which is declared with source = \"turn\": set it in completion.fields",
        ),
        ({"valeu": 1.0}, r"Score.columns has 'valeu', which is not declared: did you mean 'value'\? Else add"),
    ],
)
def test_a_wrong_column_fails_its_rollout_and_leaves_no_files(tmp_path: Path, columns: Any, message: str) -> None:
    async def scores(policy: Any) -> Score:
        await policy.chat([user("hello")])
        return Score(reward=1.0, columns=columns)

    with pytest.raises(StageError, match=message):
        played(tmp_path, scores, VALUE, LEVEL, STEP)
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step": [1.0]}, r"batch.fields.step: turn 0 has an array of shape \(1,\), expected one number or 5"),
        ({"role": [1]}, r"batch.fields.role: turn 0 has an array of shape \(1,\), expected one number$"),
        ({"role": -1}, "turn 0 has values that u8 cannot hold"),
        ({"value": 1.0}, r"completion.fields has 'value', which is declared with source = \"score\""),
    ],
)
def test_a_wrong_field_of_a_turn_fails_its_rollout(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    async def sets(policy: Any) -> float:
        (await policy.chat([user("hello")])).fields.update(fields)
        return 1.0

    with pytest.raises(StageError, match=message):
        played(tmp_path, sets, VALUE, STEP, ROLE)
    assert files(tmp_path) == []


def test_a_required_field_is_required_of_rollouts_that_the_environment_scored(tmp_path: Path) -> None:
    required = TrainerField(name="value", default=None)
    of_turns = TrainerField(name="step", source="turn", default=None)

    async def scores(policy: Any) -> float:
        await policy.chat([user("hello")])
        return 1.0

    async def fails(policy: Any) -> float:
        await policy.chat([user("hello")])
        raise PolicyFailure("wrong tool")

    with pytest.raises(StageError, match=r"Score.columns .*'value'.* batch.fields.value.default"):
        played(tmp_path, scores, required)
    with pytest.raises(StageError, match=r"turn 0 .*'step'.* batch.fields.step.default"):
        played(tmp_path, scores, of_turns)
    result, columns = played(tmp_path, fails, required, of_turns)
    assert result.policy_error == "wrong tool"
    assert (columns.token_fields, columns.loss_mask.any()) == ({}, False)


def with_values(**values: Any) -> Callable[[ReceivedRequest], Response]:
    def respond(request: ReceivedRequest) -> Response:
        response = orjson.loads(answer(request, "hello"))
        response["choices"][0] |= values
        return Response(body=orjson.dumps(response))

    return respond


async def one_turn(policy: Any) -> float:
    await policy.chat([user("hello")])
    return 1.0


def test_a_turn_carries_what_the_engine_sends_under_a_declared_name(tmp_path: Path) -> None:
    respond = with_values(step=[0.5, 1.5, 2.5, 3.5, 4.5], meta_info=None, role=3, undeclared=[1])
    _, columns = played(tmp_path / "whole", one_turn, STEP, ROLE, respond=respond)
    assert columns.token_fields["step"].tolist() == [-2.0] * (TOKENS - 5) + [0.5, 1.5, 2.5, 3.5, 4.5]
    assert columns.sample_fields["role"].tolist() == [3]
    _, columns = played(tmp_path / "cut", one_turn, STEP, respond=respond, policy=Policy(max_seq_len=TOKENS - 2))
    assert columns.token_fields["step"].tolist() == [-2.0] * (TOKENS - 5) + [0.5, 1.5, 2.5]


def test_a_response_with_a_wrong_field_is_malformed(tmp_path: Path) -> None:
    for value, message in [([1, 2], "has 2 values of step for 5 completion tokens"), ("x", "got `str` of step")]:
        with pytest.raises(Exception, match=message):
            played(tmp_path, one_turn, STEP, respond=with_values(step=value), retries=0)


def test_group_scores_have_no_columns(tmp_path: Path) -> None:
    class Judges(Plays):
        def score_group(self, example: Any, rollouts: Any) -> list[Score]:
            return [Score(reward=1.0, columns={"value": 1.0}) for _ in rollouts]

    result, _ = played(tmp_path, one_turn)
    judge = loaded(Judges(one_turn))

    async def main() -> None:
        with pytest.raises(StageError, match=r"Score.columns .*score_group"):
            await score_group(directory_store(tmp_path), judge, 0, [result])

    run(main)

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.engine_clients import attempt_of, files, loaded, run, stage_of
from support.stores import directory_store
from support.upstream import ReceivedRequest, Response, answer, serving, user
from support.waiting import wait_until_async

from headpond.config.engine import EnvironmentSettings, Policy
from headpond.environments import Score, load_environments
from headpond.environments.protocol import METRICS_OF_RECORDING
from headpond.errors import BlobUnwritten, EngineUnreachable, InfrastructureFailure, PolicyFailure, StageError
from headpond.playing.rollout import play, score_group
from headpond.records.rollout import METRICS_LIMIT, RolloutResult
from headpond.store.columns import read_columns

DOCS = Path(__file__).parents[3] / "docs" / "environments.md"
SEALED = ["columns.safetensors"]


class Talks:
    """An environment whose rollout is a given function of the policy."""

    def __init__(self, rollout: Callable[[Any], Any]) -> None:
        self._rollout = rollout

    async def rollout(self, example: Any, policy: Any) -> Any:
        return await self._rollout(policy)


async def two_turns(policy: Any) -> Score:
    messages = [user("first")]
    messages.append((await policy.chat(messages)).message)
    await policy.chat([*messages, user("second")])
    return Score(reward=0.5, rewards={"right": 0.5}, metrics={"steps": 2})


async def one_turn(policy: Any) -> float:
    await policy.chat([user("hello")])
    return 1.0


def hello(request: ReceivedRequest) -> Response:
    return Response(body=answer(request, "hello", routed="routed" in request.body.get("model", "")))


def failing(
    root: Path,
    rollout: Callable[[Any], Any],
    error: type[Exception],
    message: str,
    *,
    respond: Any = hello,
    **more: Any,
) -> None:
    """The rollout raises and leaves no files."""

    async def main() -> None:
        with serving(respond) as server:
            async with stage_of(root, server.url, **more) as stage:
                with pytest.raises(error, match=message):
                    await play(stage, loaded(Talks(rollout)), 0, attempt_of())
        assert files(root) == []

    run(main)


def test_a_rollout_becomes_a_result_and_its_files(tmp_path: Path) -> None:
    async def main() -> None:
        with serving(hello) as server:
            server.weights = "5"
            async with stage_of(tmp_path, server.url, model="routed") as stage:
                result = await play(stage, loaded(Talks(two_turns)), 0, attempt_of("g1-3", attempt=2))
                assert result.columns
                assert result.experts
                columns = read_columns(stage.store, result.columns)
        assert (columns.rollout, columns.attempt, columns.error) == ("g1-3", 2, "")
        assert result.columns.key == "rollouts/run/g1-3/2.aa/columns.safetensors"
        assert (result.reward, result.rewards, result.policy_error) == (0.5, {"right": 0.5}, None)
        assert (result.turns, result.completion_tokens, result.version_first, result.version_last) == (2, 10, 5, 5)
        assert (result.inexact_tokens, columns.turns.version_exact.tolist()) == (0, [1, 1])
        assert result.sample_lengths == (columns.input_ids.size,)
        assert result.prompt_tokens == columns.first_prompt_length[0]
        assert result.prompt_tokens + result.tool_tokens + result.completion_tokens == columns.input_ids.size
        assert (result.metrics["steps"], result.metrics["samples"], result.metrics["engine_failures"]) == (2, 1, 0)
        assert files(tmp_path) == [*SEALED, "experts.safetensors"]
        stored = result.model_copy(update={"replica_uses": {}})  # sent in the reply, beside the result
        assert RolloutResult.model_validate_json(result.model_dump_json()) == stored

    run(main)


def test_metrics_of_headpond_leave_room_for_those_of_the_environment(tmp_path: Path) -> None:
    """Two samples with rows report every metric of the recording."""
    many = {f"m{number}": 1 / 3 for number in range(METRICS_LIMIT - METRICS_OF_RECORDING)}

    async def breaks(policy: Any) -> Score:
        await policy.chat([user("first")])
        await policy.chat([user("second")])
        return Score(reward=1.0, metrics=many)

    async def main() -> None:
        with serving(hello) as server:
            async with stage_of(tmp_path, server.url, model="routed") as stage:
                result = await play(stage, loaded(Talks(breaks)), 0, attempt_of())
        assert len(result.metrics) == METRICS_LIMIT
        assert (result.metrics["breaks"], result.metrics["m0"]) == (1, 0.333333)

    run(main)


def test_a_policy_failure_is_sealed_with_its_reward(tmp_path: Path) -> None:
    async def spoils(policy: Any) -> float:
        await one_turn(policy)
        raise PolicyFailure("it opened the wrong file")

    async def main() -> None:
        with serving(hello) as server:
            async with stage_of(tmp_path, server.url, policy=Policy(policy_error_reward=-1.0)) as stage:
                result = await play(stage, loaded(Talks(spoils)), 0, attempt_of())
                assert (result.reward, result.policy_error) == (-1.0, "it opened the wrong file")
                assert result.columns
                columns = read_columns(stage.store, result.columns)
                assert columns.error == "it opened the wrong file"
                assert not columns.loss_mask.any()

    run(main)


def test_an_environment_may_score_a_policy_failure(tmp_path: Path) -> None:
    async def scores(policy: Any) -> float:
        try:
            for _ in range(10):
                await one_turn(policy)
        except PolicyFailure:
            return 0.25
        return 1.0

    async def main() -> None:
        with serving(hello) as server:
            async with stage_of(tmp_path, server.url, policy=Policy(max_turns=3)) as stage:
                result = await play(stage, loaded(Talks(scores)), 0, attempt_of())
                assert (result.reward, result.policy_error, result.turns) == (0.25, None, 3)
                assert result.columns
                assert read_columns(stage.store, result.columns).loss_mask.any()

    run(main)


def test_a_timed_out_rollout_is_sealed_with_its_turns(tmp_path: Path) -> None:
    async def lingers(policy: Any) -> float:
        await one_turn(policy)
        await policy.chat([user("and now hang")])
        return 1.0

    def respond(request: ReceivedRequest) -> Response:
        return Response(hangs=True) if "hang" in request.messages[0]["content"] else hello(request)

    async def main() -> None:
        with serving(respond) as server:
            async with stage_of(tmp_path, server.url) as stage:
                for attempt, timeout_s in enumerate((0.2, 1, 5, 25)):  # one of them is long enough for one turn
                    attempt = attempt_of(attempt=attempt, timeout_s=timeout_s)
                    result = await play(stage, loaded(Talks(lingers)), 0, attempt)
                    if result.turns:
                        break
        assert (result.turns, result.policy_error) == (1, f"timeout: the rollout took longer than {timeout_s:g} s")
        assert files(tmp_path) == SEALED

    run(main)


def test_a_policy_failure_before_the_first_turn_has_a_result_without_files(tmp_path: Path) -> None:
    async def main() -> None:
        with serving(lambda _: Response(hangs=True)) as server:
            async with stage_of(tmp_path, server.url, policy=Policy(policy_error_reward=-1.0)) as stage:
                result = await play(stage, loaded(Talks(one_turn)), 0, attempt_of(timeout_s=0.1))
        assert (result.reward, result.policy_error) == (-1.0, "timeout: the rollout took longer than 0.1 s")
        assert (result.columns, result.turns, result.sample_lengths) == (None, 0, ())
        assert files(tmp_path) == []

    run(main)


def test_an_environment_that_sends_no_chat_fails(tmp_path: Path) -> None:
    async def sends_no_chat(policy: Any) -> float:
        return 1.0

    failing(tmp_path, sends_no_chat, StageError, r"'test' left its rollout unfinished: .* recorded no turn")


def test_a_truncated_rollout_is_marked(tmp_path: Path) -> None:
    async def main() -> None:
        with serving(hello) as server:
            async with stage_of(tmp_path, server.url, policy=Policy(max_seq_len=8)) as stage:
                result = await play(stage, loaded(Talks(one_turn)), 0, attempt_of())
                assert (result.truncated, result.sample_lengths, result.policy_error) == (True, (8,), None)

    run(main)


def test_engine_failures_are_raised_and_leave_no_files(tmp_path: Path) -> None:
    def fails_later(request: ReceivedRequest) -> Response:
        return hello(request) if len(request.messages) == 1 else Response(status=500, body=b"out of memory")

    message = "failed 2 times .* 500: out of memory"
    failing(tmp_path, two_turns, InfrastructureFailure, message, respond=fails_later, retries=1)

    async def main() -> None:
        async with stage_of(tmp_path, "http://127.0.0.1:9") as stage:
            with pytest.raises(EngineUnreachable):
                await play(stage, loaded(Talks(one_turn)), 0, attempt_of())
        assert files(tmp_path) == []

    run(main)


def test_an_error_of_the_environment_names_example_and_line(tmp_path: Path) -> None:
    async def is_wrong(policy: Any) -> float:
        await one_turn(policy)
        return {}["gone"]

    failing(tmp_path, is_wrong, StageError, r"'test' failed at example 0: KeyError: 'gone' \(.*test_rollout\.py, line")


async def exits(policy: Any) -> float:
    raise SystemExit(3)


async def raises_cancelled(policy: Any) -> float:
    raise asyncio.CancelledError


async def awaits_a_cancelled_task(policy: Any) -> float:
    task = asyncio.create_task(one_turn(policy))
    task.cancel()
    return await task


async def cancels_itself(policy: Any) -> float:
    task = asyncio.current_task()
    assert task
    task.cancel()
    await asyncio.sleep(60)
    return 1.0


@pytest.mark.parametrize(
    ("ends", "name"),
    [
        (exits, "SystemExit: 3"),
        (raises_cancelled, "CancelledError: the environment cancelled its own task"),
        (awaits_a_cancelled_task, "CancelledError: the environment cancelled its own task"),
        (cancels_itself, "CancelledError: the environment cancelled its own task"),
    ],
)
def test_an_environment_that_exits_or_cancels_itself_has_failed(
    tmp_path: Path, ends: Callable[[Any], Any], name: str
) -> None:
    failing(tmp_path, ends, StageError, rf"'test' failed at example 0: {name} \(.*\.py, line")

    class Judge(Talks):
        async def score_group(self, example: Any, rollouts: Any) -> Any:
            return [await ends(None)]

    async def main() -> None:
        with pytest.raises(StageError, match=f"example 0: {name}"):
            await score_group(directory_store(tmp_path), loaded(Judge(one_turn)), 0, [RolloutResult(reward=1.0)])

    run(main)


def test_a_rollout_that_ignores_its_time_out_is_a_failure_of_the_policy(tmp_path: Path) -> None:
    """It is cancelled again, by the limit of its execution or by a worker that stops."""
    ignored = asyncio.Event()

    async def ignores(policy: Any) -> float:
        try:
            await asyncio.sleep(60)
        finally:
            ignored.set()
            await asyncio.sleep(60)
        return 1.0

    async def main() -> None:
        with serving(hello) as server:
            async with stage_of(tmp_path, server.url, policy=Policy(policy_error_reward=-1.0)) as stage:
                playing = asyncio.create_task(play(stage, loaded(Talks(ignores)), 0, attempt_of(timeout_s=0.1)))
                await ignored.wait()
                playing.cancel()
                result = await playing
        assert (result.reward, result.policy_error) == (-1.0, "timeout: the rollout took longer than 0.1 s")

    run(main)


def test_a_malformed_message_is_an_error_of_the_environment(tmp_path: Path) -> None:
    async def sends_no_role(policy: Any) -> float:
        await policy.chat([{"content": "who am I?"}])
        return 1.0

    failing(
        tmp_path, sends_no_role, StageError, r"failed at example 0: BadRequest: messages\[0\] must be an object with a"
    )


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (float("nan"), "the reward is nan"),
        (None, "the reward is None"),
        (Score(reward=1.0, metrics={"turns": 3}), "returned a metric turns, which Headpond reports"),
        (Score(reward=1.0, metrics={f"m{number}": 0.0 for number in range(30)}), "a score has 30 metrics"),
    ],
)
def test_an_invalid_score_fails_the_rollout(tmp_path: Path, score: Any, message: str) -> None:
    async def scores(policy: Any) -> Any:
        await one_turn(policy)
        return score

    failing(tmp_path, scores, StageError, message)


def test_a_chat_in_flight_at_the_end_fails_the_rollout(tmp_path: Path) -> None:
    forgotten: list[asyncio.Task[Any]] = []

    async def forgets(policy: Any) -> float:
        await one_turn(policy)
        forgotten.append(asyncio.create_task(policy.chat([user("hang")])))
        await asyncio.sleep(0)
        return 1.0

    def respond(request: ReceivedRequest) -> Response:
        return Response(hangs=True) if request.messages[0]["content"] == "hang" else hello(request)

    async def main() -> None:
        with serving(respond) as server:
            async with stage_of(tmp_path, server.url) as stage:
                with pytest.raises(StageError, match=r"left its rollout unfinished: Busy: .* in-flight chat"):
                    await play(stage, loaded(Talks(forgets)), 0, attempt_of())
                forgotten[0].cancel()
                await asyncio.wait(forgotten)
        assert files(tmp_path) == []

    run(main)


def test_an_unwritable_store_fails_the_rollout(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("in the way")

    async def main() -> None:
        with serving(hello) as server:
            async with stage_of(tmp_path, server.url) as stage:
                with pytest.raises(BlobUnwritten, match="check free space and permissions"):
                    await play(stage, loaded(Talks(one_turn)), 0, attempt_of())

    run(main)


def test_a_group_is_scored_from_its_files(tmp_path: Path) -> None:
    def respond(request: ReceivedRequest) -> Response:
        number = {"r0": 14, "r1": 21, "r2": 14}[request.headers["X-Session-ID"].split(".")[0]]
        return Response(body=answer(request, f"Let me see.\nAnswer: {number}"))

    async def main() -> None:
        environment = load_environments({"d": EnvironmentSettings(use="distinct")})["d"]
        with serving(respond) as server:
            async with stage_of(tmp_path, server.url) as stage:
                results = [await play(stage, environment, 5, attempt_of(f"r{number}")) for number in range(3)]
                assert [result.reward for result in results] == [1.0, 1.0, 1.0]
                scores = await score_group(stage.store, environment, 5, results)
                assert [score.reward for score in scores] == [0.5, 1.0, 0.5]

    run(main)


def test_score_group_may_be_a_coroutine_and_must_score_all(tmp_path: Path) -> None:
    class Judge(Talks):
        async def score_group(self, example: Any, rollouts: Any) -> Any:
            await asyncio.sleep(0)
            return [{"best": float(len(rollouts[0].conversations[0]))}] * (len(rollouts) - (example == "short"))

    async def main() -> None:
        with serving(hello) as server:
            async with stage_of(tmp_path, server.url) as stage:
                judge = Judge(one_turn)
                judge.examples = ["whole", "short"]
                results = [await play(stage, loaded(judge), 0, attempt_of())] * 2
                scores = await score_group(stage.store, loaded(judge), 0, results)
                assert scores == [Score(reward=2.0, rewards={"best": 2.0})] * 2
                with pytest.raises(StageError, match="1 scores for 2 rollouts"):
                    await score_group(stage.store, loaded(judge), 1, results)
                with pytest.raises(StageError, match="it has no score_group"):
                    await score_group(stage.store, loaded(Talks(one_turn)), 0, results)

    run(main)


def test_the_example_in_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert source
    assert source[1].count("\n") <= 22
    (tmp_path / "capitals.py").write_text(source[1])
    monkeypatch.syspath_prepend(tmp_path)

    def respond(request: ReceivedRequest) -> Response:
        country, hinted = request.messages[0]["content"], len(request.messages) > 1
        right = "France" in country or (hinted and "Japan" in country)
        return Response(body=answer(request, {"F": "Paris", "J": "Tokyo"}[country[23]] if right else "no idea"))

    async def main() -> None:
        settings = EnvironmentSettings(use="capitals:Capitals", options={"hint_cost": 0.25})
        environment = load_environments({"capitals": settings})["capitals"]
        with serving(respond) as server:
            async with stage_of(tmp_path / "store", server.url) as stage:
                results = [await play(stage, environment, index, attempt_of(f"r{index}")) for index in range(3)]
        assert [result.reward for result in results] == [1.0, 0.25, 0.0]
        assert [result.turns for result in results] == [1, 2, 2]
        assert server.received[-1].body["temperature"] == 0.7

    run(main)


def test_a_rollout_cancelled_during_a_request_leaves_no_files(tmp_path: Path) -> None:
    async def main() -> None:
        with serving(lambda _: Response(hangs=True)) as server:
            async with stage_of(tmp_path, server.url) as stage:
                playing = asyncio.create_task(play(stage, loaded(Talks(one_turn)), 0, attempt_of()))
                await wait_until_async(lambda: server.answering)
                assert files(tmp_path)
                playing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await playing
                await wait_until_async(lambda: not server.answering)
        assert files(tmp_path) == []

    run(main)

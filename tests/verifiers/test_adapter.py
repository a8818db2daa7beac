"""A real environment of `verifiers`, played through a real session server. The upstream follows a script."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from support.playing import attempt_of, loaded
from support.session_process import JSON, Script, SessionsProcess
from support.upstream import Says, Seen, answer
from support.waiting import wait_until, wait_until_async

from penstock.environments.verifiers import Verifiers, verifiers_process
from penstock.errors import EngineUnreachable, InfrastructureFailure, StageError
from penstock.messages import RolloutResult
from penstock.playing.rollout import play
from penstock.store import Store
from penstock.store.columns import read_columns

Run = Callable[[Coroutine[Any, Any, Any]], Any]
Played = Callable[..., RolloutResult]
Example = Callable[[str], int]


def test_an_episode_has_its_weighted_rewards_by_name_its_metrics_and_its_tokens(
    played: Played, script: Script, server: SessionsProcess
) -> None:
    result = played("answers")
    assert result.reward == 1.75
    assert result.rewards == {"whole": 1.0, "first": 0.25, "second": 0.5}
    assert result.policy_error is None
    assert result.metrics["length"] == len("answer 1 to answers")
    assert "depth" not in result.metrics, "the others were not chosen"
    assert result.columns
    assert result.experts
    columns = read_columns(Store(server.store), result.columns)
    assert bytes(columns.input_ids[columns.loss_mask == 1].tolist()) == b"answer 1 to answers"
    asked = script.seen("answers")[-1]
    assert asked.body["model"] == "the-policy"
    assert "Authorization" not in asked.headers, "the session's key is not for the engine"


def test_graders_that_keep_time_with_signals_work(played: Played, script: Script) -> None:
    script.says["boxed"] = says("so it is \\boxed{4}")
    assert played("boxed").rewards["whole"] == 1.0


@pytest.mark.parametrize("stage", ["agent", "finalize", "scoring"])
def test_a_time_out_is_no_success(played: Played, server: SessionsProcess, stage: str) -> None:
    """The package returns it ok, and with rewards."""
    result = played(f"{stage}_timeout")
    assert result.policy_error == f"timeout: {stage}_timeout"
    assert (result.reward, result.rewards) == (0.0, {})
    assert result.columns
    assert not read_columns(Store(server.store), result.columns).loss_mask.any()


def test_a_set_up_that_takes_too_long_is_tried_again(played: Played) -> None:
    with pytest.raises(InfrastructureFailure, match="setup_timeout"):
        played("setup_timeout")


@pytest.mark.parametrize("trick", ["answers", "swallows"])
def test_an_engine_that_fails_is_tried_again_whatever_the_harness_makes_of_it(
    played: Played, script: Script, trick: str
) -> None:
    script.says[trick] = lambda seen: Says(status=500, body=b'{"error": "out of memory"}', headers=JSON)
    try:
        with pytest.raises(InfrastructureFailure, match=r"ProviderError: upstream 500: .*out of memory") as failure:
            played(trick)
        assert not isinstance(failure.value, EngineUnreachable)
    finally:
        del script.says[trick]


def test_an_engine_that_is_away_counts_as_nothing(played: Played, script: Script) -> None:
    script.server.stop()
    try:
        with pytest.raises(EngineUnreachable, match="the engine cannot be reached"):
            played("answers")
    finally:
        script.server.start()


@pytest.mark.parametrize(
    ("trick", "why"),
    [
        ("raises", r"TaskError: .*KeyError: 'a bug of its own' \(File .*tricks.py\", line \d+, in whole\)"),
        ("exits", "HarnessError: harness 'tricks' exited 7: no such tool"),
        ("nan", "whole: not a finite number"),
    ],
)
def test_a_bug_of_the_environment_says_where(played: Played, trick: str, why: str) -> None:
    with pytest.raises(StageError, match=why):
        played(trick)


def test_a_limit_that_the_policy_has_reached_is_its_own_failure(played: Played, script: Script) -> None:
    limit = b'{"error": {"message": "this model\'s maximum context length is 4096 tokens"}}'
    script.says["answers"] = lambda seen: Says(status=400, body=limit, headers=JSON)
    try:
        result = played("answers")
    finally:
        del script.says["answers"]
    assert result.policy_error
    assert "maximum context length" in result.policy_error


def test_programs_of_a_harness_see_neither_our_settings_nor_a_key(played: Played, script: Script) -> None:
    assert "hunter2" in os.environ["PENSTOCK_REDIS_URL"]
    played("asks_the_machine")
    (environment,) = {seen.messages[-1]["content"] for seen in script.server.seen if "PATH=" in str(seen.body)}
    assert "TRICKS_MARKS=" in environment
    assert "PENSTOCK" not in environment
    assert "hunter2" not in environment


def test_many_episodes_at_once_share_a_process_and_keep_apart(
    tricks: Verifiers, stages: Any, server: SessionsProcess, on_loop: Run
) -> None:
    async def main() -> list[RolloutResult]:
        async with stages() as stage:
            environment = loaded(tricks, name="tricks")
            return await asyncio.gather(*(play(stage, environment, 0, attempt_of(f"many{n}")) for n in range(40)))

    results = on_loop(main())
    assert {result.reward for result in results} == {1.75}
    assert len({result.columns.key for result in results if result.columns}) == 40
    assert server.status()["sessions"]["open"] == 0


def test_a_cancelled_episode_leaves_no_program_no_directory_and_no_session(
    tricks: Verifiers, stages: Any, server: SessionsProcess, on_loop: Run, marks: Path, example: Example
) -> None:
    pid = marks / "pid"

    async def main() -> None:
        async with stages() as stage:
            attempt = attempt_of("cancelled")
            playing = asyncio.create_task(play(stage, loaded(tricks), example("program"), attempt))
            await wait_until_async(lambda: pid.exists() and pid.read_text().strip(), timeout_s=30)
            assert directory_of(marks).is_dir()
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing

    on_loop(main())
    assert not directory_of(marks).exists()
    group = int(pid.read_text())
    wait_until(lambda: not members(group), what="the program and its children to be gone")
    assert server.status()["sessions"]["open"] == 0
    assert not (server.store / "rollouts" / "run" / "cancelled").exists()


def test_an_episode_over_its_time_is_cancelled_and_a_failure_of_the_policy(played: Played, marks: Path) -> None:
    result = played("program", timeout_s=3.0)
    assert result.policy_error == "timeout: the rollout took longer than 3 s"
    assert not directory_of(marks).exists()


def directory_of(marks: Path) -> Path:
    return Path((marks / "workdir").read_text().strip())


def members(group: int) -> list[int]:
    stats = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat") if path.exists()]
    fields = [stat.rpartition(")")[2].split() for stat in stats]
    return [int(each[2]) for each in fields if int(each[2]) == group and each[0] != "Z"]


def test_a_process_that_dies_fails_its_rollouts_leaves_nothing_and_is_replaced_once(
    tricks: Verifiers, stages: Any, on_loop: Run, marks: Path, example: Example
) -> None:
    pid = marks / "pid"
    pid.unlink(missing_ok=True)

    async def main() -> None:
        async with stages() as stage:
            environment = loaded(tricks, name="tricks")
            beside = asyncio.create_task(play(stage, environment, example("program"), attempt_of("beside")))
            await wait_until_async(lambda: pid.exists() and pid.read_text().strip(), timeout_s=30)
            with pytest.raises(InfrastructureFailure, match="the environment's process died"):
                await play(stage, environment, example("kills_itself"), attempt_of("died"))
            with pytest.raises(InfrastructureFailure, match="the environment's process died"):
                await beside
            after = [play(stage, environment, 0, attempt_of(f"after{n}")) for n in range(4)]
            assert {result.reward for result in await asyncio.gather(*after)} == {1.75}

    before = pid_of(tricks)
    on_loop(main())
    assert pid_of(tricks) != before
    everything = directory_of(marks).parents[2]
    assert everything.name.startswith("penstock-verifiers-")
    wait_until(lambda: not members(int(pid.read_text())) and not everything.exists(), what="its program to be gone")


def test_a_reward_that_never_returns_ends_the_process_not_the_worker(
    tricks: Verifiers, stages: Any, on_loop: Run, example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifiers_process, "SILENCE_S", 3.0)
    monkeypatch.setattr(verifiers_process, "END_S", 0.1)

    async def main() -> None:
        async with stages() as stage:
            with pytest.raises(InfrastructureFailure, match="hung: its loop did not turn"):
                await play(stage, loaded(tricks), example("hangs"), attempt_of("hung"))

    hung = pid_of(tricks)
    on_loop(main())
    wait_until(lambda: not Path(f"/proc/{hung}").exists())


def pid_of(environment: Verifiers) -> int:
    return environment._process.pid  # pyright: ignore[reportPrivateUsage]


def says(text: str) -> Callable[[Seen], Says]:
    return lambda seen: Says(body=answer(seen, text), headers=JSON)

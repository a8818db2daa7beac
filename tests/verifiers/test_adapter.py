"""A real `verifiers` environment, played through a real session server with a scripted upstream engine."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from support.engine_clients import attempt_of, loaded
from support.session_process import JSON, Script, SessionsProcess
from support.stores import directory_store
from support.upstream import ReceivedRequest, Response, answer
from support.waiting import wait_until, wait_until_async

from headpond.environments.verifiers import Verifiers, verifiers_process
from headpond.errors import EngineUnreachable, InfrastructureFailure, StageError
from headpond.playing.rollout import play
from headpond.records.rollout import RolloutResult
from headpond.store.columns import read_columns

Run = Callable[[Coroutine[Any, Any, Any]], Any]
Played = Callable[..., RolloutResult]
Example = Callable[[str], int]


def test_an_episode_returns_its_weighted_named_rewards_its_metrics_and_its_tokens(
    played: Played, script: Script, server: SessionsProcess
) -> None:
    result = played("answers")
    assert result.reward == 1.75
    assert result.rewards == {"whole": 1.0, "first": 0.25, "second": 0.5}
    assert result.policy_error is None
    assert result.metrics["length"] == len("answer 1 to answers")
    assert "depth" not in result.metrics, "it was not selected"
    assert result.columns
    assert result.experts
    columns = read_columns(directory_store(server.store), result.columns)
    assert bytes(columns.input_ids[columns.loss_mask == 1].tolist()) == b"answer 1 to answers"
    request = script.received("answers")[-1]
    assert request.body["model"] == "the-policy"
    assert "Authorization" not in request.headers, "the session's key must not reach the engine"


def test_graders_that_use_signal_timeouts_work(played: Played, script: Script) -> None:
    script.responses["boxed"] = responding("so it is \\boxed{4}")
    assert played("boxed").rewards["whole"] == 1.0


@pytest.mark.parametrize("stage", ["agent", "finalize", "scoring"])
def test_a_timeout_is_a_failure_of_the_policy(played: Played, server: SessionsProcess, stage: str) -> None:
    """The package reports such an episode as ok, with rewards."""
    result = played(f"{stage}_timeout")
    assert result.policy_error == f"timeout: {stage}_timeout"
    assert (result.reward, result.rewards) == (0.0, {})
    assert result.columns
    assert not read_columns(directory_store(server.store), result.columns).loss_mask.any()


def test_a_setup_timeout_is_an_infrastructure_failure(played: Played) -> None:
    with pytest.raises(InfrastructureFailure, match="setup_timeout"):
        played("setup_timeout")


@pytest.mark.parametrize("trick", ["answers", "swallows"])
def test_an_engine_failure_is_an_infrastructure_failure_even_if_the_harness_ignores_it(
    played: Played, script: Script, trick: str
) -> None:
    script.responses[trick] = lambda _: Response(status=500, body=b'{"error": "out of memory"}', headers=JSON)
    try:
        with pytest.raises(InfrastructureFailure, match=r"ProviderError: upstream 500: .*out of memory") as failure:
            played(trick)
        assert not isinstance(failure.value, EngineUnreachable)
    finally:
        del script.responses[trick]


def test_an_unreachable_engine_is_reported_as_such(played: Played, script: Script) -> None:
    script.server.stop()
    try:
        with pytest.raises(EngineUnreachable, match="the engine cannot be reached"):
            played("answers")
    finally:
        script.server.start()


@pytest.mark.parametrize(
    ("trick", "reason"),
    [
        ("raises", r"TaskError: .*KeyError: 'a bug' \(File .*tricks.py\", line \d+, in whole\)"),
        ("exits", "HarnessError: harness 'tricks' exited 7: no such tool"),
        ("nan", "whole: not a finite number"),
    ],
)
def test_a_bug_of_the_environment_names_its_line(played: Played, trick: str, reason: str) -> None:
    with pytest.raises(StageError, match=reason):
        played(trick)


def test_a_limit_reached_by_the_policy_is_a_failure_of_the_policy(played: Played, script: Script) -> None:
    limit = b'{"error": {"message": "this model\'s maximum context length is 4096 tokens"}}'
    script.responses["answers"] = lambda _: Response(status=400, body=limit, headers=JSON)
    try:
        result = played("answers")
    finally:
        del script.responses["answers"]
    assert result.policy_error
    assert "maximum context length" in result.policy_error


def test_programs_of_a_harness_inherit_no_headpond_settings(played: Played, script: Script) -> None:
    assert "hunter2" in os.environ["HEADPOND_REDIS_URL"]
    played("prints_environment")
    (environment,) = {
        request.messages[-1]["content"] for request in script.server.received if "PATH=" in str(request.body)
    }
    assert "TRICKS_MARKS=" in environment
    assert "HEADPOND" not in environment
    assert "hunter2" not in environment


def test_concurrent_episodes_share_a_process_and_stay_separate(
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
    """Several times, each as soon as the program runs: the package may still be starting it."""
    pid = marks / "pid"

    async def main(rollout: str) -> None:
        async with stages() as stage:
            playing = asyncio.create_task(play(stage, loaded(tricks), example("program"), attempt_of(rollout)))
            while not (pid.exists() and pid.read_text().strip()):
                await asyncio.sleep(0)
            assert directory_of(marks).is_dir()
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing

    for number in range(8):
        pid.unlink(missing_ok=True)
        on_loop(main(f"cancelled{number}"))
        wait_until(lambda: not directory_of(marks).exists(), what="the directory is removed")
        group = int(pid.read_text())
        wait_until(lambda group=group: not members(group), what="the program and its children have ended")
    assert server.status()["sessions"]["open"] == 0
    assert not list((server.store / "rollouts" / "run").glob("cancelled*"))


def test_an_episode_over_its_time_limit_is_cancelled_and_a_failure_of_the_policy(played: Played, marks: Path) -> None:
    result = played("program", timeout_s=3.0)
    assert result.policy_error == "timeout: the rollout took longer than 3 s"
    assert not directory_of(marks).exists()


def directory_of(marks: Path) -> Path:
    return Path((marks / "workdir").read_text().strip())


def members(group: int) -> list[int]:
    stats: list[str] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
            stats.append(path.read_text())
    fields = [stat.rpartition(")")[2].split() for stat in stats]
    return [int(each[2]) for each in fields if int(each[2]) == group and each[0] != "Z"]


def test_a_process_that_dies_fails_its_rollouts_is_cleaned_up_and_replaced_once(
    tricks: Verifiers, stages: Any, on_loop: Run, marks: Path, example: Example
) -> None:
    pid = marks / "pid"
    pid.unlink(missing_ok=True)

    async def main() -> None:
        async with stages() as stage:
            environment = loaded(tricks, name="tricks")
            beside = asyncio.create_task(play(stage, environment, example("program"), attempt_of("beside")))
            await wait_until_async(lambda: pid.exists() and pid.read_text().strip())
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
    assert everything.name.startswith("headpond-verifiers-")
    wait_until(lambda: not members(int(pid.read_text())) and not everything.exists(), what="its program has ended")


def test_a_reward_that_never_returns_fails_its_rollout_and_ends_the_process(
    tricks: Verifiers, stages: Any, on_loop: Run, example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifiers_process, "HANG_TIMEOUT_S", 3.0)
    monkeypatch.setattr(verifiers_process, "SHUTDOWN_TIMEOUT_S", 0.1)

    async def main() -> None:
        async with stages() as stage:
            with pytest.raises(InfrastructureFailure, match="hung: no heartbeat"):
                await play(stage, loaded(tricks), example("hangs"), attempt_of("hung"))

    hung = pid_of(tricks)
    on_loop(main())
    wait_until(lambda: not Path(f"/proc/{hung}").exists())


def pid_of(environment: Verifiers) -> int:
    return environment._process.pid  # pyright: ignore[reportPrivateUsage]


def responding(text: str) -> Callable[[ReceivedRequest], Response]:
    return lambda request: Response(body=answer(request, text), headers=JSON)

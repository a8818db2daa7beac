import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support import graders
from support.engine_clients import run
from support.processes import alive, children
from support.waiting import wait_until, wait_until_async

from headpond.environments import Score, graded, grading
from headpond.errors import HeadpondError, InfrastructureFailure, PolicyFailure, StageError


def grading_with(processes: int, body: Callable[[grading.GraderPool], Awaitable[None]]) -> None:
    """Run `body`; afterwards no process of the pool is left, not even a zombie."""
    before = children()

    async def main() -> None:
        await body(grading.install(processes))

    run(main)
    assert children() == before


def test_a_judge_runs_in_a_process_that_is_reused() -> None:
    async def body(pool: grading.GraderPool) -> None:
        assert await graded(graders.same, "42", "42") == 1.0
        assert await graded(graders.same, "42", "43", timeout_s=30) == 0.0
        pids = {await graded(graders.process) for _ in range(3)}
        assert pids == set(pool.pids)
        assert os.getpid() not in pids
        assert len(pids) == 1

    grading_with(4, body)


def test_arguments_and_results_are_json_values_or_a_score() -> None:
    async def body(_: grading.GraderPool) -> None:
        long = "\x00 \n \ud800 é 😀" * 100_000
        assert await graded(graders.same, long, long) == 1.0
        odd = (None, True, 10**100, -0.5, ["a", {"b": []}], "😀")
        assert await graded(graders.echo, *odd) == list(odd)
        assert str(await graded(graders.echo, float("nan"))) == "[nan]"
        assert await graded(graders.returns_numpy) == {"right": True, "share": 0.5}
        assert await graded(graders.score, 0.5) == Score(reward=0.5, rewards={"right": 0.5}, metrics={"tests": 3})
        with pytest.raises(StageError, match="a grader's score has no columns"):
            await graded(graders.with_columns, 1.0)

    grading_with(1, body)


GIVEN = r", given 9 characters$"


@pytest.mark.parametrize(
    ("judge", "kind", "message"),
    [
        (graders.exits, PolicyFailure, r"graders:exits ended its process with exit code 3" + GIVEN),
        (graders.calls_exit, PolicyFailure, r"graders:calls_exit ended its process with exit code 1" + GIVEN),
        (graders.segfaults, PolicyFailure, r"graders:segfaults died of SIGSEGV" + GIVEN),
        (graders.needs_memory, PolicyFailure, r"graders:needs_memory needed more than 256 MB of memory" + GIVEN),
        (graders.goes_deep, PolicyFailure, r"graders:goes_deep raised RecursionError" + GIVEN),
        (
            graders.closes_everything,
            PolicyFailure,
            r"graders:closes_everything closed or misused its process's socket" + GIVEN,
        ),
        (graders.answers_out_of_turn, PolicyFailure, r"closed or misused its process's socket" + GIVEN),
        (
            graders.is_killed,
            InfrastructureFailure,
            r"graders:is_killed was killed from outside \(SIGKILL\): check whether",
        ),
        (graders.raises, StageError, r"graders:raises failed: KeyError: 'an answer' \(.*graders\.py, line \d+\)"),
        (graders.returns_an_object, StageError, r"TypeError: it returned a object: return a JSON value or a Score"),
        (graders.returns_much, StageError, r"ValueError: it returned 100,013 bytes of JSON: the limit is 65,536"),
    ],
)
def test_each_failure_of_a_judge_is_classified(judge: Any, kind: type[HeadpondError], message: str) -> None:
    async def body(_: grading.GraderPool) -> None:
        with pytest.raises(kind, match=message):
            await graded(judge, "an answer", memory_mb=256)

    grading_with(1, body)


def test_a_judge_may_raise_the_failures_of_an_environment() -> None:
    async def body(_: grading.GraderPool) -> None:
        for kind in (PolicyFailure, InfrastructureFailure):
            with pytest.raises(kind, match=r"^raised by the judge$"):
                await graded(graders.raises_kind, kind.__name__)
        with pytest.raises(StageError, match="StageError: raised by the judge"):
            await graded(graders.raises_kind, "StageError")

    grading_with(1, body)


def test_a_judge_over_its_time_limit_is_killed_with_its_children_and_no_other_judge_is(tmp_path: Path) -> None:
    begun, until, started = tmp_path / "begun", tmp_path / "until", tmp_path / "started"

    async def body(_: grading.GraderPool) -> None:
        other = asyncio.create_task(graded(graders.waits, str(begun), str(until), timeout_s=100))
        await wait_until_async(begun.exists)
        with pytest.raises(PolicyFailure, match=r"did not end within 0\.1 s"):
            await graded(graders.catastrophic, "a" * 60 + "b", timeout_s=0.1)
        for timeout_s in (0.2, 1, 5, 25):  # one of them is long enough for a process to start
            with pytest.raises(PolicyFailure, match="did not end within"):
                await graded(graders.starts_another, str(started), timeout_s=timeout_s)
            if started.exists() and len(started.read_text().split()) == 2:
                break
        await wait_until_async(lambda: not any(map(alive, map(int, started.read_text().split()))))
        until.touch()
        assert await other == int(begun.read_text())

    grading_with(2, body)


def test_waiting_for_a_free_grader_does_not_count_against_the_time_limit() -> None:
    async def body(_: grading.GraderPool) -> None:
        first = asyncio.create_task(graded(graders.takes, 2.2, timeout_s=100))
        assert await asyncio.gather(*(graded(graders.same, "a", "a", timeout_s=2) for _ in range(3))) == [1.0] * 3
        assert first.done()

    grading_with(1, body)


def test_the_number_of_processes_is_bounded() -> None:
    async def body(pool: grading.GraderPool) -> None:
        pids = await asyncio.gather(*(graded(graders.process, "x" * number) for number in range(50)))
        assert set(pids) == set(pool.pids)
        assert len(pool.pids) <= 2

    grading_with(2, body)


@pytest.mark.parametrize("judge", [graders.loops, graders.catastrophic_by_name, graders.starts_another])
def test_cancellation_kills_the_process_and_frees_its_slot(judge: Any, tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"

    async def body(pool: grading.GraderPool) -> None:
        working = asyncio.create_task(graded(judge, str(pid_file), timeout_s=100))
        waiting = asyncio.create_task(graded(graders.same, "a", "a"))
        behind = asyncio.create_task(graded(graders.same, "b", "b"))
        await wait_until_async(lambda: pid_file.exists() and pid_file.read_text())
        for task in (waiting, working):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert not alive(int(pid_file.read_text().split()[0]))
        assert await behind == 1.0
        assert len(pool.pids) == 1

    grading_with(1, body)
    for pid in map(int, pid_file.read_text().split()):
        wait_until(lambda pid=pid: not alive(pid))


def test_cancellation_while_the_process_starts() -> None:
    async def body(pool: grading.GraderPool) -> None:
        for pauses in range(6):
            working = asyncio.create_task(graded(graders.process))
            for _ in range(pauses):
                await asyncio.sleep(0.005)
            working.cancel()
            await asyncio.wait([working])
        assert await graded(graders.process) in pool.pids

    grading_with(1, body)


def test_no_slot_or_process_is_lost_whenever_callers_are_cancelled(tmp_path: Path) -> None:
    async def one(number: int) -> object:
        if number % 4 == 0:
            return await graded(graders.catastrophic, "a" * 60 + "b", timeout_s=0.02)
        return await graded(graders.exits if number % 7 == 0 else graders.process, "x" * number)

    async def body(pool: grading.GraderPool) -> None:
        tasks = [asyncio.create_task(one(number)) for number in range(20)]
        for number, task in enumerate(tasks):
            asyncio.get_running_loop().call_later(number * 0.03, task.cancel if number % 3 == 0 else lambda: None)
        await asyncio.wait(tasks)
        assert all(isinstance(task.exception(), PolicyFailure | None) for task in tasks if not task.cancelled())
        met = [tmp_path / str(number) for number in range(3)]
        together = [asyncio.create_task(graded(graders.waits, str(path), str(tmp_path / "go"))) for path in met]
        await wait_until_async(lambda: all(path.exists() and path.read_text() for path in met))
        (tmp_path / "go").touch()
        assert set(await asyncio.gather(*together)) == set(pool.pids)
        assert len(pool.pids) == 3

    grading_with(3, body)


def test_busy_and_idle_graders_end_with_the_loop(tmp_path: Path) -> None:
    pid_file, before = tmp_path / "pid", children()

    async def main() -> None:
        await graded(graders.same, "a", "a")
        main.looping = asyncio.create_task(graded(graders.loops, str(pid_file), timeout_s=100))
        await wait_until_async(lambda: pid_file.exists() and pid_file.read_text())

    run(main)
    assert children() == before
    assert not grading._pools


def test_a_busy_grader_ends_with_a_killed_worker(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = (
        "import asyncio; from headpond.environments import graded; from support import graders; "
        f"asyncio.run(graded(graders.catastrophic_by_name, {str(pid_file)!r}, timeout_s=100))"
    )
    worker = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": ":".join(sys.path)})
    pid = int(wait_until(lambda: pid_file.exists() and pid_file.read_text()))
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    wait_until(lambda: not alive(pid))


def test_a_judge_gets_no_settings_or_modules_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADPOND_REDIS_URL", "redis://:hunter2@127.0.0.1/0")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")

    async def body(_: grading.GraderPool) -> None:
        variables = await graded(graders.settings)
        assert not any(name.startswith("HEADPOND_") for name in variables)
        assert "hunter2" not in str(variables)
        assert (variables["OMP_NUM_THREADS"], variables["OPENBLAS_NUM_THREADS"]) == ("2", "1")
        assert not {"numpy", "pydantic", "headpond"} & set(variables["modules"].split())

    grading_with(1, body)


def test_a_grader_killed_while_idle_is_replaced() -> None:
    async def body(_: grading.GraderPool) -> None:
        first = await graded(graders.process)
        os.kill(first, signal.SIGKILL)
        await wait_until_async(lambda: not alive(first))
        assert await graded(graders.process) != first

    grading_with(1, body)


def test_a_process_is_replaced_after_its_maximum_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "MAX_CALLS", 2)

    async def body(_: grading.GraderPool) -> None:
        pids = [await graded(graders.process) for _ in range(4)]
        assert pids[0] == pids[1] != pids[2] == pids[3]

    grading_with(1, body)


@pytest.mark.parametrize(
    ("judge", "argument", "message"),
    [
        (lambda answer: 1.0, "a", "<lambda> cannot be a grader: its process must import it by name"),
        (graders.Judge().judge, "a", r"Judge\.judge cannot be a grader"),
        ("judge", "a", "'judge' cannot be a grader"),
        (graders.raises, {1, 2}, "are not JSON-serializable: Object of type set"),
        (graders.raises, Score(reward=1.0), "are not JSON-serializable: Object of type Score"),
        (graders.raises, [10**5000], "are not JSON-serializable: Exceeds the limit"),
    ],
)
def test_graders_and_arguments_that_cannot_be_sent_are_refused(judge: Any, argument: Any, message: str) -> None:
    async def body(pool: grading.GraderPool) -> None:
        with pytest.raises(StageError, match=message):
            await graded(judge, argument)
        assert pool.pids == []

    grading_with(1, body)


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        (
            "os.no_such_thing",
            StageError,
            r"cannot be imported in its process: AttributeError: .*odd_judge\.py, line 2\)",
        ),
        ("raise MemoryError", InfrastructureFailure, "importing odd_judge for its grader judge failed: .*MemoryError"),
        ("os._exit(4)", InfrastructureFailure, "importing odd_judge for its grader judge ended its process"),
    ],
)
def test_a_judge_whose_import_fails_in_the_child(
    source: str, kind: type[HeadpondError], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_judge.py").write_text(
        f"import os, sys\nif 'grader_child' in sys.argv[0]: {source}\ndef judge(answer): return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import odd_judge

    async def body(_: grading.GraderPool) -> None:
        with pytest.raises(kind, match=message):
            await graded(odd_judge.judge, "a")

    try:
        grading_with(1, body)
    finally:
        del sys.modules["odd_judge"]


def test_the_default_is_one_process_per_core() -> None:
    async def main() -> None:
        assert grading.install().processes == len(os.sched_getaffinity(0))

    run(main)

"""The supervisor of `headpond up`: what it does with a process that ends before it is ready."""

import os
import re
from pathlib import Path

import pytest
from support.small_disk import LARGE_BYTES, LimitedDirectory
from support.waiting import wait_until

from headpond.batches.signals import RankProgress, write_progress
from headpond.commands.launcher import parts, supervisor
from headpond.commands.launcher.parts import Part
from headpond.commands.launcher.supervisor import FAILURES_MOST, Supervisor, last_line, reason_of
from headpond.config import RunConfig
from headpond.errors import RunError
from headpond.processes.child_process import ChildProcess

FAILING = Part(name="failing", command=("sh", "-c", "exit 1"), is_ready=lambda *_: False)


def test_it_waits_while_the_disk_is_full_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process cannot write its log there, and ends without a word."""
    monkeypatch.setattr(supervisor, "PAUSE_MOST_S", 0.01)
    started = Supervisor(tmp_path, os.environ, tmp_path)
    try:
        started.start(FAILING)
        failing = started.parts["failing"]
        failing.pause_s = 0.01

        def restarted(times: int) -> bool:
            started.check()
            return failing.restarts >= times

        with monkeypatch.context() as full:
            full.setattr("headpond.inspection.status.FULL_BYTES", 1 << 62)
            wait_until(lambda: restarted(FAILURES_MOST + 3), what="more starts than a hopeless process gets")
        assert f"the disk of {tmp_path} is full: free space" in failing.last_end
        assert f"the disk of {tmp_path} is full: free space" in caplog.text
        with pytest.raises(RunError, match=f"the failing ended with exit code 1, {FAILURES_MOST} times"):
            wait_until(lambda: restarted(100), what="the end")
    finally:
        started.kill()


def test_the_end_of_a_trainer_is_logged_with_its_last_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    started = Supervisor(tmp_path, os.environ, tmp_path)
    try:
        started.start(
            Part(name="trainer", command=("sh", "-c", "echo no data"), is_ready=lambda *_: False, ends="done")
        )

        def over() -> bool:
            started.check()
            return started.over("trainer")

        wait_until(over)
    finally:
        started.kill()
    assert re.search(r"process=trainer .*exit code 0;.* not started again.* no data", caplog.text)


def test_a_large_log_is_kept_while_the_disk_is_too_full_for_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LOG_BYTES", LARGE_BYTES)
    monkeypatch.setattr(supervisor, "LOOK_AT_LOGS_S", -1.0)
    (tmp_path / "limit").mkdir()
    (tmp_path / "limit" / "largest").write_bytes(bytes(LARGE_BYTES + 1))
    started = Supervisor(tmp_path, os.environ, tmp_path)
    try:
        started.start(Part(name="steady", command=("sleep", "600"), is_ready=lambda *_: True))
        log, copy = tmp_path / "steady.log", tmp_path / "steady.log.1"
        log.write_bytes(b"x" * 2 * LARGE_BYTES)
        with LimitedDirectory(tmp_path).full(os.getpid(), "limit"):
            started.check()
            assert (log.stat().st_size, copy.exists()) == (2 * LARGE_BYTES, False)
        started.check()
        assert (log.stat().st_size, copy.stat().st_size) == (0, 2 * LARGE_BYTES)
    finally:
        started.kill()


TORCHRUN = """
[rank0]: Traceback (most recent call last):
[rank0]:   File "trainer.py", line 7, in <module>
[rank0]: RuntimeError: no data
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
  exitcode  : 1 (pid: 7)
  traceback : To enable traceback see: the documentation
============================================================
"""


@pytest.mark.parametrize(
    ("output", "last", "reason"),
    [
        (TORCHRUN, "  traceback : To enable traceback see: the documentation", "[rank0]: RuntimeError: no data"),
        ("step 1\n----\n", "step 1", "step 1"),
        ("====\n", "(no output)", "(no output)"),
        ("KeyError: 'x'\nbye\n", "bye", "KeyError: 'x'"),
    ],
)
def test_the_reason_of_an_end_is_the_last_error_in_the_log(tmp_path: Path, output: str, last: str, reason: str) -> None:
    failing = ["sh", "-c", 'printf %s "$1"; exit 1', "sh", output]
    process = ChildProcess("failing", failing, directory=tmp_path, variables={})
    wait_until(lambda: process.ended)
    assert (last_line(process), reason_of(process)) == (last, reason)


def test_a_trainer_is_ready_when_its_present_process_has_opened_the_run(tmp_path: Path) -> None:
    config = RunConfig(run_dir=tmp_path, trainer={"command": "python trainer.py"})
    has_opened = parts.trainer(config).is_ready
    assert not has_opened("", 0.0)
    write_progress(tmp_path, RankProgress(data_rank=0, data_ranks=1, epoch=1, resume_step=-1, acked=-1))
    assert has_opened("", 0.0)
    opened_at = (tmp_path / "trainer" / "rank_00.json").stat().st_mtime
    assert not has_opened("", opened_at + 1.0), "by an earlier process"

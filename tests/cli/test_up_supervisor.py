"""The supervisor of `penstock up`: what it does with a process that ends before it is ready."""

import os
from pathlib import Path

import pytest
from support.small_disk import LARGE_BYTES, LimitedDirectory
from support.waiting import wait_until

from cli.up import supervisor
from cli.up.parts import Part
from cli.up.supervisor import STARTS_MOST, Supervisor
from penstock.errors import RunError

FAILING = Part(name="failing", command=("sh", "-c", "exit 1"), is_ready=lambda _: False)


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
            full.setattr("penstock.inspection.status.FULL_BYTES", 1 << 62)
            wait_until(lambda: restarted(STARTS_MOST + 3), what="more starts than a hopeless process gets")
        assert f"the disk of {tmp_path} is full: free space" in failing.last_words
        assert f"the disk of {tmp_path} is full: free space" in caplog.text
        with pytest.raises(RunError, match=f"failing ended {STARTS_MOST} times before it was ready"):
            wait_until(lambda: restarted(100), what="the end")
    finally:
        started.kill()


def test_the_end_of_a_trainer_is_logged_with_its_last_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    started = Supervisor(tmp_path, os.environ, tmp_path)
    try:
        started.start(Part(name="trainer", command=("sh", "-c", "echo no data"), is_ready=lambda _: False, ends="done"))

        def over() -> bool:
            started.check()
            return started.over("trainer")

        wait_until(over)
    finally:
        started.kill()
    assert "process=trainer ended with exit code 0; it is not started again. Its last line: no data" in caplog.text


def test_a_large_log_is_kept_while_the_disk_is_too_full_for_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LOG_BYTES", LARGE_BYTES)
    monkeypatch.setattr(supervisor, "LOOK_AT_LOGS_S", -1.0)
    (tmp_path / "limit").mkdir()
    (tmp_path / "limit" / "largest").write_bytes(bytes(LARGE_BYTES + 1))
    started = Supervisor(tmp_path, os.environ, tmp_path)
    try:
        started.start(Part(name="steady", command=("sleep", "600"), is_ready=lambda _: True))
        log, copy = tmp_path / "steady.log", tmp_path / "steady.log.1"
        log.write_bytes(b"x" * 2 * LARGE_BYTES)
        with LimitedDirectory(tmp_path).full(os.getpid(), "limit"):
            started.check()
            assert (log.stat().st_size, copy.exists()) == (2 * LARGE_BYTES, False)
        started.check()
        assert (log.stat().st_size, copy.stat().st_size) == (0, 2 * LARGE_BYTES)
    finally:
        started.kill()

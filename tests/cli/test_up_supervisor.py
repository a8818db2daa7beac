"""The supervisor of `penstock up`: what it does with a process that ends before it is ready."""

import os
from pathlib import Path

import pytest
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

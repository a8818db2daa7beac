import os
import signal
from pathlib import Path

import pytest
from support.waiting import HANG_S, wait_until

from bench.harness.canary import Canary
from headpond.errors import RunError
from headpond.processes.child_process import ChildProcess


def python(tmp_path: Path, code: str) -> ChildProcess:
    return ChildProcess("python", ["python", "-c", code], directory=tmp_path, variables={"WORD": "hello"})


def test_waiting_ends_when_the_condition_is_true(tmp_path: Path) -> None:
    process = python(tmp_path, "import os, time; print(os.environ['WORD'], flush=True); time.sleep(60)")
    process.wait_until(lambda: "hello" in process.output_tail, what="a word", timeout_s=HANG_S)
    process.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_all_processes_share_one_session(tmp_path: Path) -> None:
    process = python(tmp_path, "import time; time.sleep(60)")
    with Canary() as canary:
        assert os.getsid(process.pid) == os.getsid(canary.pid) == os.getsid(0)
    process.kill()


def test_the_log_of_a_process_that_ends_too_early_is_quoted(tmp_path: Path) -> None:
    process = python(tmp_path, "raise SystemExit('no disk')")
    with pytest.raises(RunError, match=r"python ended before the answer.*\n.*no disk"):
        process.wait_until(lambda: False, what="the answer", timeout_s=HANG_S)
    process.kill()


def test_killing_a_process_kills_its_children(tmp_path: Path) -> None:
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    process = python(tmp_path, code)
    child = int(process.wait_until(lambda: process.output_tail.strip(), what="its child's id", timeout_s=HANG_S))
    process.kill()
    wait_until(lambda: not cmdline(child))


def test_the_exit_code_is_known_before_and_after_reaping(tmp_path: Path) -> None:
    terminated = python(tmp_path, "print('up', flush=True); import time; time.sleep(60)")
    terminated.wait_until(lambda: terminated.output, what="a word", timeout_s=HANG_S)
    assert terminated.exit_code is None
    terminated.terminate()
    failed = python(tmp_path, "raise SystemExit(3)")
    for process, code in ((terminated, -signal.SIGTERM), (failed, 3)):
        wait_until(lambda process=process: process.ended)
        assert process.exit_code == code
        process.kill()
        process.terminate()
        assert process.exit_code == code


def cmdline(pid: int) -> str:
    """Empty for a zombie, and for a process that is gone."""
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_text() if path.exists() else ""

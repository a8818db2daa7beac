import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import alive
from support.waiting import HANG_S, wait_until

from headpond.errors import RunError
from headpond.processes.child_process import TAIL_BYTES, ChildProcess, program

STARTS = """
import subprocess, sys, time
from pathlib import Path
from headpond.processes.child_process import ChildProcess, Guard

guard = Guard()
child = ChildProcess("child", ["python", "-c", sys.argv[2]], directory=Path(sys.argv[1]), variables={})
guard.add(child)
child.wait_until(lambda: child.output.strip(), what="its child", timeout_s=60)
print(child.pid, child.output.strip(), flush=True)
time.sleep(600)
"""


SLEEPER = """
import subprocess, time
print(subprocess.Popen(["sleep", "600"], start_new_session=SESSION).pid, flush=True)
time.sleep(600)
"""
sessions = pytest.mark.parametrize("session", [False, True], ids=["group", "session"])


@sessions
def test_a_guard_ends_what_the_children_of_a_killed_process_have_started(tmp_path: Path, session: bool) -> None:
    command = [sys.executable, "-c", STARTS, str(tmp_path), SLEEPER.replace("SESSION", str(session))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child, grandchild = map(int, parent.stdout.readline().split())
        assert alive(child) > (not alive(grandchild))
        parent.send_signal(signal.SIGKILL)
        wait_until(lambda: not alive(child) and not alive(grandchild), what="the end of child and grandchild")


@sessions
@pytest.mark.parametrize("ended", [False, True], ids=["running", "ended"])
def test_a_killed_process_leaves_nothing_that_it_has_started(tmp_path: Path, session: bool, ended: bool) -> None:
    """Also what it has left running at its own end: a launcher of trainers that was killed leaves their ranks."""
    code = SLEEPER.replace("SESSION", str(session))
    process = ChildProcess("child", ["python", "-c", code], directory=tmp_path, variables={})
    grandchild = int(process.wait_until(lambda: process.output.strip(), what="its child", timeout_s=HANG_S))
    if ended:
        process.signal(signal.SIGKILL)
        wait_until(lambda: process.ended)
    assert alive(grandchild)
    process.kill()
    wait_until(lambda: not alive(grandchild), what="the end of the grandchild")


def test_a_process_without_a_group_of_its_own_is_killed_too(tmp_path: Path) -> None:
    """It left the group; or it was killed in the moment before it had one."""
    code = "import os, time; os.setpgid(0, os.getpgid(os.getppid())); print('left', flush=True); time.sleep(600)"
    process = ChildProcess("child", ["python", "-c", code], directory=tmp_path, variables={})
    process.wait_until(lambda: process.output, what="its change of the group", timeout_s=HANG_S)
    process.kill()
    assert not alive(process.pid)


def test_without_a_directory_the_output_is_that_of_this_process(tmp_path: Path) -> None:
    code = """
from headpond.processes.child_process import ChildProcess
process = ChildProcess("child", ["sh", "-c", "echo out; echo err >&2"], directory=None, variables={})
process.wait_until(lambda: process.ended, what="its end", timeout_s=60)
assert process.output == process.output_tail == ""
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("out\n", "err\n")
    assert not list(tmp_path.iterdir())


def test_what_a_child_starts_as_children_of_its_own_ends_with_the_first(tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
from headpond.processes.child_process import ChildProcess
code = {SLEEPER.replace("SESSION", "True")!r}
inner = ChildProcess("inner", ["python", "-c", code], directory=Path("."), variables={{}})
print(inner.wait_until(lambda: inner.output.strip(), what="its child", timeout_s=60), flush=True)
time.sleep(600)
"""
    process = ChildProcess("outer", ["python", "-c", code], directory=tmp_path, variables={})
    last = int(process.wait_until(lambda: process.output.strip(), what="the last child", timeout_s=HANG_S))
    process.kill()
    wait_until(lambda: not alive(last), what="the end of the last child")


def test_an_appended_log_shows_the_output_of_the_present_process(tmp_path: Path) -> None:
    for word in ("first", "second"):
        process = ChildProcess(
            "echo", ["python", "-c", f"print('{word}')"], directory=tmp_path, variables={}, append=True
        )
        wait_until(lambda process=process: process.ended)
        assert process.output == f"{word}\n"
        assert process.how_it_ended == "ended with exit code 0"
        process.kill()
    assert (tmp_path / "echo.log").read_text() == "first\nsecond\n"


def test_the_tail_of_the_output_begins_with_a_line(tmp_path: Path) -> None:
    code = "print('first ' * 99); print(*range(10_000), sep='\\n'); print('last')"
    process = ChildProcess("count", ["python", "-c", code], directory=tmp_path, variables={})
    wait_until(lambda: process.ended)
    lines = process.output_tail.splitlines()
    assert (lines[-2:], len(process.output_tail) <= TAIL_BYTES) == (["9999", "last"], True)
    assert lines == process.output.splitlines()[-len(lines) :]
    process.kill()


def test_the_environment_and_directory_may_be_given(tmp_path: Path) -> None:
    code = "import os; print(os.getcwd(), os.environ['A'], os.environ.get('HOME'))"
    process = ChildProcess(
        "echo", ["python", "-c", code], directory=tmp_path, variables={"A": "1"}, environment={}, cwd=Path("/")
    )
    process.wait_until(lambda: process.output, what="its output", timeout_s=HANG_S)
    assert process.output == "/ 1 None\n"
    process.kill()


def test_a_program_is_found_beside_the_interpreter_then_on_the_path() -> None:
    assert program("headpond") == str(Path(sys.executable).parent / "headpond")
    assert program("sh").startswith("/")
    with pytest.raises(RunError, match=r"'vlmm' .*not found"):
        program("vlmm")

import subprocess
import sys

from bench.harness.procfs import cpu_s

BURNT_S = 0.3 - 0.02  # user and system time are each rounded down to ticks of 10 ms
BURN = "import time\nwhile time.process_time() < {seconds}: pass\n"
CHILD_BURNS = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN.format(seconds=0.3)!r}])\n"
CHILD_WAITS = (
    "import subprocess, sys\n"
    f"child = subprocess.Popen([sys.executable, '-c', {BURN.format(seconds=0.3)!r} + 'print(flush=True); input()'])\n"
    "child.wait()\n"
)


def test_the_time_of_a_living_child_counts() -> None:
    parent = subprocess.Popen([sys.executable, "-c", CHILD_WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    parent.stdout.readline()
    assert cpu_s(parent.pid) >= BURNT_S
    parent.communicate(b"\n")


def test_the_time_of_a_reaped_child_and_of_a_zombie_counts() -> None:
    parent = subprocess.Popen([sys.executable, "-c", CHILD_BURNS], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    parent.stdout.read()  # EOF: the process has ended and is not reaped
    assert cpu_s(parent.pid) >= BURNT_S
    parent.communicate()


def test_a_reaped_process_has_no_time() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert cpu_s(process.pid) == 0

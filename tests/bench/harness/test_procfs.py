import subprocess
import sys

from bench.harness.procfs import cpu_s

BURN = "import time\nwhile time.process_time() < {seconds}: pass\n"
CHILD_BURNS = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN.format(seconds=0.3)!r}])\n"
CHILD_WAITS = (
    "import subprocess, sys\n"
    f"child = subprocess.Popen([sys.executable, '-c', {BURN.format(seconds=0.3)!r} + 'print(flush=True); input()'])\n"
    "child.wait()\n"
)


def test_a_living_child_counts() -> None:
    parent = subprocess.Popen([sys.executable, "-c", CHILD_WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    parent.stdout.readline()
    assert cpu_s(parent.pid) >= 0.3
    parent.communicate(b"\n")


def test_a_child_that_was_waited_for_counts_and_so_does_a_zombie() -> None:
    parent = subprocess.Popen([sys.executable, "-c", CHILD_BURNS], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    parent.stdout.read()  # its end, without waiting for it
    assert cpu_s(parent.pid) >= 0.3
    parent.communicate()


def test_a_process_that_is_gone_used_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert cpu_s(process.pid) == 0

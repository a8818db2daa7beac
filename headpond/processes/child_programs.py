"""Programs that run in children of Headpond, before or beside other programs.

They are processes of their own: a `preexec_fn` would run Python in a fork of a process with
threads.
"""

import inspect

# Variable that every descendant of a child inherits. Not HEADPOND_*: those are not passed on.
MARK = "STARTED_BY"


def kill_marked(mark: str) -> None:
    """Kill the processes whose MARK has this word: some leave their process group, such as
    torchrun's ranks.

    The search repeats until it finds none, because a process may fork meanwhile.
    """
    import os
    import signal
    from pathlib import Path

    for _ in range(8):
        killed_any = False
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if mark.encode() in (path / "environ").read_bytes():
                    os.kill(int(path.name), signal.SIGKILL)
                    killed_any = True
            except OSError:
                continue
        if not killed_any:
            return


# Runs a program that ends with the process that started it. The kernel sends the parent-death
# signal when the *thread* that started the child ends. It sends none if that thread ended earlier.
LAUNCHER = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) != 0:
    sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent ended before its program started")
os.execv(sys.argv[2], sys.argv[2:])
"""
# Kills the named process groups and marked processes when the parent ends in any way. The
# parent-death signal does not reach the descendants of children. Each input line is `+PGID MARK` or
# `-PGID MARK`. The directory in the argument is removed last.
GUARD = f"""
import os, shutil, signal, sys
{inspect.getsource(kill_marked)}
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    group, mark = line[1:].split()
    (groups.add if line[0] == "+" else groups.discard)((int(group), mark))
for group, mark in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
    kill_marked(mark)
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""

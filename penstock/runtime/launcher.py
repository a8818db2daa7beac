"""Programs that run in children of Penstock, before or beside what they start.

They run in a process of their own: a `preexec_fn` would run Python in a fork of a process with threads.
"""

# Executes a program that ends with the process that starts it. The kernel sends the parent-death signal when the
# *thread* that started the child ends, and none if it has ended before.
LAUNCHER = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) != 0:
    sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent ended before its program started")
os.execv(sys.argv[2], sys.argv[2:])
"""
# Kills the process groups that its parent names (`+PGID`, `-PGID`, a line each) when the parent ends in any way: the
# parent-death signal does not reach what the children have started. Then it removes the directory of its argument.
GUARD = """
import os, shutil, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""

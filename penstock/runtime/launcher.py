"""A launcher for child programs that must end with the process that starts them.

It runs in the child and then executes the program; a `preexec_fn` would run Python in a fork of a process with threads.
The kernel sends the parent-death signal when the *thread* that started the child ends, and none if it has ended before.
"""

LAUNCHER = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) != 0:
    sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent ended before its program started")
os.execv(sys.argv[2], sys.argv[2:])
"""

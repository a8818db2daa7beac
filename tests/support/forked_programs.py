"""`headpond` and `celery` as forks of a server that has imported their libraries: 0.1 s of CPU a start instead of 1 s.

Each is a separate process with its own session, signals and exit code. Programs read their environment after the fork.
"""

import atexit
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from support import crash_points

# Libraries, and those of our modules that read no settings at import.
PRELOADED = [
    "celery.bin.celery",
    "celery.apps.worker",
    "celery.concurrency.prefork",
    "celery.worker.consumer",
    "kombu.transport.redis",
    "headpond.commands.main",
    "headpond.orchestrator.loop",
    "headpond.orchestrator.start",
    "headpond.playing.rollout",
    "headpond.demo.scripted_engine.http_server",
    "headpond.servers.sessions.session_server",
    "uvloop",
]
PROGRAMS = ("headpond", "celery")
PR_SET_PDEATHSIG = 1

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


def is_program(command: list[str]) -> bool:
    """Whether the command is one of PROGRAMS, installed beside this interpreter."""
    path = Path(command[0])
    return path.name in PROGRAMS and path.parent == Path(sys.executable).parent


class Forked:
    """The part of `subprocess.Popen` that tests use."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path, directory: Path) -> None:
        self._process = _context.Process(target=_become, args=(command, environment, log, directory))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        while self.poll() is None and os.getpgid(self.pid) != self.pid:
            time.sleep(0.001)  # its group can be signalled only when it leads one

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout_s)
        return self._process.exitcode


def _become(command: list[str], environment: dict[str, str], log: Path, directory: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    os.close(output)
    # Ends with the fork server, which ends with this process.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = command
    if "FAULT_CONTROL" in environment:  # preloaded into the server, which has no such variable
        ctypes.CDLL(None).fault_shim_open()
    try:
        _run(Path(command[0]).name)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # a forked process skips this at its exit
        atexit._run_exitfuncs()


def _run(program: str) -> None:
    if program == "celery":
        from celery.__main__ import main
    else:
        from headpond.commands.main import main

        if crash_at := os.environ.get(crash_points.VARIABLE):
            crash_points.install(crash_at)
    main()

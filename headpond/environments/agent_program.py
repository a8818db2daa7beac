"""Runs agents that are programs of their own. `run_program` starts one for one rollout and kills
its process group."""

import contextlib
import os
import pwd
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headpond.environments.protocol import AgentPolicy
from headpond.errors import ConfigError
from headpond.event_loop.cancellation import opening
from headpond.event_loop.offload import in_io_thread
from headpond.processes.child_programs import LAUNCHER
from headpond.processes.privacy import inherited_variables
from headpond.spans import timed

# Programs yield the CPU to the event loop that serves them. At normal priority, 16 starting at
# once took 90 % of the loop's time.
NICENESS = 10
MAX_OUTPUT_BYTES = 1 << 20  # Limit for a program's output: its last bytes.
BLOCK_BYTES = 1 << 16  # The capacity of a pipe.


@dataclass(frozen=True, kw_only=True)
class AgentUser:
    """The user that programs run as, in place of this process's user."""

    uid: int
    gid: int
    variables: Mapping[str, str]

    @property
    def switch(self) -> str:
        """Python code that changes the user and gives it the output. It runs before
        PR_SET_PDEATHSIG, which a change of user clears. It runs after all imports: the user may
        have no access to this Python."""
        ids = f"{self.uid}, {self.gid}"
        return f"os.fchown(1, {ids}); os.setgroups([]); os.setgid({self.gid}); os.setuid({self.uid})\n"


_user: AgentUser | None = None


def run_as(name: str | None) -> None:
    """Run all later programs of this process as user `name`; None means its own user. Raise
    ConfigError."""
    global _user
    _user = _agent_user(name) if name else None


def _agent_user(name: str) -> AgentUser | None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise ConfigError(f"rollouts.agent_user: this machine has no user {name!r}") from None
    if entry.pw_uid == os.geteuid():
        return None
    if os.geteuid() != 0:
        raise ConfigError(f"rollouts.agent_user = {name!r}: only a worker that runs as root can change the user")
    variables = {"HOME": entry.pw_dir, "USER": name, "LOGNAME": name}
    return AgentUser(uid=entry.pw_uid, gid=entry.pw_gid, variables=variables)


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    exit_code: int  # Exit code; a negative one is the signal that killed the program.
    output: str  # Standard output and standard error.


async def run_program(
    command: Sequence[str],
    policy: AgentPolicy,
    *,
    variables: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> ProgramResult:
    """Run `command` with the policy's URL, key and model in `policy.variables`. Its process group
    is killed when this call returns, raises or is cancelled; the program also ends with this
    process. It inherits this process's environment except Headpond's settings, and runs as
    `rollouts.agent_user`."""
    script = f"import ctypes, os; os.nice({NICENESS})\n{_user.switch if _user else ''}{LAUNCHER}"
    launcher = [sys.executable, "-I", "-S", "-c", script, str(os.getpid())]
    user_variables = _user.variables if _user else {}
    environment = {**inherited_variables(), **user_variables, **policy.variables, **(variables or {})}
    # Each fork blocks its caller (380 ms when 16 programs started at once), so it runs in a thread.
    starting = in_io_thread(_start, [*launcher, *command], environment, directory)
    with timed("program", Path(command[0]).name):
        async with opening(starting, _kill) as program:
            return await in_io_thread(_wait, program)


def _start(command: Sequence[str], environment: Mapping[str, str], directory: Path | None) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=directory,
        # Not a new session: NICENESS counts only among the processes of the worker's session.
        process_group=0,
    )


def _wait(program: "subprocess.Popen[bytes]") -> ProgramResult:
    """Read the output until the program ends, even if one of its children leaves the pipe open."""
    assert program.stdout is not None
    tail = bytearray()
    with program.stdout as output, os.fdopen(os.pidfd_open(program.pid)) as end_file:
        os.set_blocking(output.fileno(), False)
        poll = select.poll()
        for file in (output, end_file):
            poll.register(file, select.POLLIN)
        while not any(descriptor == end_file.fileno() for descriptor, _ in poll.poll()):
            if not _read_block(output.fileno(), tail):
                poll.unregister(output)
        for _ in range(MAX_OUTPUT_BYTES // BLOCK_BYTES):
            if not _read_block(output.fileno(), tail):
                break
    return ProgramResult(exit_code=program.wait(), output=tail.decode(errors="replace"))


def _read_block(descriptor: int, tail: bytearray) -> bool:
    """Read a block into the tail. Return False if the pipe is empty or closed."""
    try:
        block = os.read(descriptor, BLOCK_BYTES)
    except BlockingIOError:
        return False
    tail += block
    del tail[:-MAX_OUTPUT_BYTES]
    return bool(block)


async def _kill(program: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    await in_io_thread(program.wait)

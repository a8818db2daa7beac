"""An agent that is a program of its own: started for one rollout, and ended with every process that it started."""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.environments.protocol import AgentPolicy
from penstock.runtime.cancellation import run_to_completion
from penstock.runtime.launcher import LAUNCHER
from penstock.runtime.offload import in_io_thread

NICENESS = 10
"""Programs wait for a core before the loop that serves them does: sixteen that start at once took 90 % of its time."""
OUTPUT_BYTES = 1 << 20
"""Of what a program says, the last so many are kept."""
BLOCK_BYTES = 1 << 16  # what a pipe holds


@dataclass(frozen=True, kw_only=True)
class Finished:
    exit_code: int
    """negative: ended by that signal"""
    output: str
    """what it wrote to standard output and standard error"""


async def run_program(
    command: Sequence[str],
    policy: AgentPolicy,
    *,
    variables: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Finished:
    """`command`, with the policy's URL and key in its environment as the `openai` package reads them.

    It has a process group of its own, which is killed when this returns, raises or is cancelled; the program itself
    also ends with this process. Of this process's own environment it gets all but Penstock's settings.
    """
    launcher = [sys.executable, "-I", "-S", "-c", f"import os; os.nice({NICENESS})\n{LAUNCHER}", str(os.getpid())]
    environment = {**without_our_settings(), **policy.variables, **(variables or {})}
    # In a thread: the loop would stand still for every fork (380 ms when 16 programs started at once).
    starting = asyncio.create_task(in_io_thread(_start, [*launcher, *command], environment, directory))
    try:
        return await in_io_thread(_finished, await asyncio.shield(starting))
    finally:
        await run_to_completion(asyncio.create_task(_kill(starting)))


def without_our_settings() -> dict[str, str]:
    """This process's variables for one that is not trusted: the addresses of Redis and of the engine have keys and
    passwords in them."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}


def _start(command: Sequence[str], environment: Mapping[str, str], directory: Path | None) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=directory,
        process_group=0,
    )


def _finished(program: "subprocess.Popen[bytes]") -> Finished:
    """When the program has ended, whoever else still holds its output."""
    assert program.stdout is not None
    kept = bytearray()
    with program.stdout as output, os.fdopen(os.pidfd_open(program.pid)) as ended:
        os.set_blocking(output.fileno(), False)
        watched = select.poll()
        for file in (output, ended):
            watched.register(file, select.POLLIN)
        while not any(descriptor == ended.fileno() for descriptor, _ in watched.poll()):
            if not _take(output.fileno(), kept):
                watched.unregister(output)
        for _ in range(OUTPUT_BYTES // BLOCK_BYTES):
            if not _take(output.fileno(), kept):
                break
    return Finished(exit_code=program.wait(), output=kept.decode(errors="replace"))


def _take(descriptor: int, kept: bytearray) -> bool:
    """False when there is nothing to take, now or ever."""
    try:
        block = os.read(descriptor, BLOCK_BYTES)
    except BlockingIOError:
        return False
    kept += block
    del kept[:-OUTPUT_BYTES]
    return bool(block)


async def _kill(starting: "asyncio.Task[subprocess.Popen[bytes]]") -> None:
    await asyncio.wait([starting])
    if starting.cancelled() or starting.exception():
        return
    program = starting.result()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    await in_io_thread(program.wait)

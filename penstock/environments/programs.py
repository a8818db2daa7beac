"""An agent that is a program of its own: started for one rollout, and ended with every process that it started."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.embedded_redis import LAUNCHER
from penstock.environments.protocol import AgentPolicy

OUTPUT_BYTES = 1 << 20
"""Of what a program says, the last so many are kept."""


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
    also ends with this process.
    """
    launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid())]
    program = await asyncio.create_subprocess_exec(
        *launcher,
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **policy.variables, **(variables or {})},
        cwd=directory,
        start_new_session=True,
    )
    try:
        output = await _last_output(program)
        return Finished(exit_code=await program.wait(), output=output)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)


async def _last_output(program: asyncio.subprocess.Process) -> str:
    assert program.stdout is not None
    kept = bytearray()
    while block := await program.stdout.read(1 << 16):
        kept += block
        del kept[:-OUTPUT_BYTES]
    return kept.decode(errors="replace")

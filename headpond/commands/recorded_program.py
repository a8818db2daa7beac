"""A program in front of a session server of this process: run, sealed, and written as files."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headpond.commands.transcript import transcript
from headpond.config import RunConfig
from headpond.environments.protocol import agent_variables
from headpond.errors import NothingToTrain
from headpond.event_loop import factory as event_loop
from headpond.playing.agent_sessions import SessionServers
from headpond.processes.child_programs import LAUNCHER
from headpond.processes.privacy import inherited_variables
from headpond.records.rollout import Recorded
from headpond.servers.sessions.session_server import CONCURRENCY, serving
from headpond.store import open_store
from headpond.store.columns import read_columns

# A program may take this long to end after SIGTERM.
KILL_S = 10.0
FILES = {"columns": "session.safetensors", "experts": "experts.safetensors"}
TRANSCRIPT = "transcript.md"


def record(config: RunConfig, command: Sequence[str], out: Path, *, stdout: int | None = None) -> dict[str, Any]:
    """Return a summary with the program's exit code. Files are written only if there is a turn. `stdout`: descriptor
    for the program's output, by default that of this process."""
    work = _record(config, command, out, stdout)
    return event_loop.run(work, concurrency=CONCURRENCY, cpu_threads=config.sessions.cpu_workers)


async def _record(config: RunConfig, command: Sequence[str], out: Path, stdout: int | None) -> dict[str, Any]:
    async with (
        serving(config) as (server, url),
        SessionServers.open(config.sessions.model_copy(update={"urls": (url,)})) as servers,
        servers.session({}) as session,
    ):
        variables = agent_variables(session.base_url, session.secret, config.engine.model)
        code = await _run(command, {**inherited_variables(), **variables}, stdout)
        ended = {"exit_code": code if code >= 0 else 128 - code, "refused": dict(server.refused)}
        try:
            sealed, posted = await session.seal("")
        except NothingToTrain:
            return {**ended, "turns": 0, "files": []}
        files = await asyncio.to_thread(_write, config, sealed, out, command)
    metrics = {**sealed.metrics, **posted.metrics}
    return {
        **ended,
        "turns": sealed.turns,
        "samples": len(sealed.sample_lengths),
        "sample_lengths": sealed.sample_lengths,
        "completion_tokens": sealed.completion_tokens,
        "metrics": metrics,
        "score": None if not posted.rewarded else asdict(posted.score),
        "files": files,
    }


async def _run(command: Sequence[str], variables: Mapping[str, str], stdout: int | None) -> int:
    """Run the program on this terminal. Ctrl-C reaches both: the program decides, and its conversation is kept."""
    launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid())]
    program = await asyncio.create_subprocess_exec(*launcher, *command, env=dict(variables), stdout=stdout)
    async with _signals(program):
        return await program.wait()


@contextlib.asynccontextmanager
async def _signals(program: asyncio.subprocess.Process) -> AsyncIterator[None]:
    """The second Ctrl-C kills the program; SIGTERM is passed on, and kills it later."""
    loop, interrupts = asyncio.get_running_loop(), list[int]()

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            program.kill()

    def interrupted() -> None:
        interrupts.append(signal.SIGINT)
        if len(interrupts) > 1:
            kill()

    def terminated() -> None:
        with contextlib.suppress(ProcessLookupError):
            program.terminate()
        loop.call_later(KILL_S, kill)

    loop.add_signal_handler(signal.SIGINT, interrupted)
    loop.add_signal_handler(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(signum)


def _write(config: RunConfig, sealed: Recorded, out: Path, command: Sequence[str]) -> list[str]:
    assert sealed.columns is not None, "a session without a turn is not sealed"
    store = open_store(config.store_url)
    text = transcript(read_columns(store, sealed.columns), title=" ".join(command))
    (out / TRANSCRIPT).write_text(text)
    written = [str(out / TRANSCRIPT)]
    for name, file in FILES.items():
        if (ref := getattr(sealed, name)) is not None:
            store.export(ref.key, out / file)
            written.append(str(out / file))
    return written


def line(summary: Mapping[str, Any]) -> str:
    refused = "".join(f", {count} x {status}" for status, count in summary["refused"].items())
    if not summary["turns"]:
        return f"headpond: the program sent no request that was answered{refused}; nothing is written"
    metrics = summary["metrics"]
    return (
        f"headpond: {summary['turns']} turns, {summary['samples']} samples, {metrics.get('breaks', 0):g} breaks, "
        f"{summary['completion_tokens']} sampled tokens{refused} -> {', '.join(summary['files'])}"
    )

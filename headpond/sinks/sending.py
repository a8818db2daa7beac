"""Sends the lines of metrics.jsonl to W&B, TensorBoard and trackio, from a process of its own.

The libraries start threads and wait for networks: none is loaded into the orchestrator, sees its HEADPOND_* variables,
or costs the run anything when it fails or hangs. The process ends when its stdin does, also because its orchestrator
was killed.
"""

import asyncio
import contextlib
import logging
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator

from headpond.config import RunConfig
from headpond.processes.privacy import inherited_variables

logger = logging.getLogger("headpond.sinks")

RETRY_S = 60.0
FINISH_S = 20.0  # for the last lines, when the run ends
WORDS_MOST = 600  # of its last words, in a note
MODULE = "headpond.sinks.process"


class Sinks:
    def __init__(self, config: RunConfig, run: str) -> None:
        self._run_dir = config.run_dir.resolve()
        settings = config.metrics
        name = settings.name or self._run_dir.name
        self._command = [sys.executable, "-m", MODULE, str(self._run_dir), run, settings.project, name, *settings.sinks]
        self._environment = inherited_variables() | {"PYTHONSAFEPATH": "1"}
        self._wanted = settings.sinks
        self._patience_s = 0.0
        self.notes: list[str] = []  # why steps are not sent

    @contextlib.asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        """While the body runs; then the last lines, unless the body was cancelled."""
        if not self._wanted:
            yield
            return
        ended = asyncio.Event()
        task = asyncio.create_task(self._run(ended))
        try:
            yield
            self._patience_s = FINISH_S
        finally:
            ended.set()  # instead of a cancellation: that would kill a process that is being started
            await asyncio.wait([task])

    async def _run(self, ended: asyncio.Event) -> None:
        while True:
            try:
                words = await self._send(ended)
            except OSError as error:  # no process can be started at present
                words = str(error)
            names = ", ".join(self._wanted)
            if words:
                self.notes = [
                    f"steps are not sent to {names} ({words}); metrics.jsonl has them, and they are sent later"
                ]
                logger.error("action=sinks_failed sinks=%s error=%s", names, words)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await ended.wait()
                return
            self.notes = []

    async def _send(self, ended: asyncio.Event) -> str | None:
        """From a process of its own until it fails, or until the run has ended and the last lines are sent. Why it
        failed."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=PIPE,
            stdout=DEVNULL,
            stderr=PIPE,
            env=self._environment,
        )
        assert process.stdin
        words, end = asyncio.create_task(_last_words(process)), asyncio.create_task(ended.wait())
        try:
            await asyncio.wait([words, end], return_when=asyncio.FIRST_COMPLETED)
            if not words.done():
                process.stdin.close()
                await asyncio.wait([words], timeout=self._patience_s)
            if words.done():
                return None if ended.is_set() and process.returncode == 0 else words.result()
            logger.warning("action=sinks_killed after_s=%g", self._patience_s)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            return None
        finally:
            words.cancel()
            end.cancel()


async def _last_words(process: Process) -> str:
    """The end of what the process writes to stderr, when it has ended."""
    assert process.stderr
    kept = b""
    while part := await process.stderr.read(4096):
        kept = (kept + part)[-WORDS_MOST:]
    await process.wait()
    return kept.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {process.returncode}"

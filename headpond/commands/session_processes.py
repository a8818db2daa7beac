"""`headpond sessions --processes N`: a session server for each of N ports, started again when it dies.

A server that is started again has its sessions: they are found by its port. If one cannot start the first time, the
command ends; one that cannot start again is tried again.
"""

import logging
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

from headpond.commands.interrupts import Interrupts
from headpond.commands.launcher.parts import Part
from headpond.commands.launcher.supervisor import Supervisor
from headpond.config import RunConfig
from headpond.errors import ConfigError

logger = logging.getLogger("headpond.sessions")

TICK_S = 0.05
REFUSED = 2  # exit code of a server with a wrong configuration, which it has printed
KILL_S = 5.0  # beyond sessions.drain_s


def supervise(config: RunConfig, arguments: Sequence[str]) -> int:
    """Run until SIGINT or SIGTERM; return the exit code. `arguments` are those of this command."""
    settings = config.sessions
    if settings.port == 0 or settings.port + settings.processes > 1 << 16:
        raise ConfigError(f"--processes {settings.processes} needs as many ports from --port on: name one below 65000")
    if settings.instance_id:
        raise ConfigError("--instance-id names one process: leave it out with --processes, sessions are found by port")
    interrupts = Interrupts()
    supervisor = Supervisor(None, os.environ, Path.cwd(), failures_most=math.inf)
    try:
        for port in range(settings.port, settings.port + settings.processes):
            supervisor.start(_server(port, arguments))
        while not (interrupts.signals or _is_refused(supervisor)):
            supervisor.check()
            time.sleep(TICK_S)
        supervisor.stop(within_s=settings.drain_s + KILL_S, at_once=lambda: interrupts.twice)
        return REFUSED if _is_refused(supervisor) else 0
    finally:
        supervisor.kill()


def _is_refused(supervisor: Supervisor) -> bool:
    """Whether a server has ended at its first start."""
    return any(each.process.exit_code == REFUSED and not each.restarts for each in supervisor.parts.values())


def _server(port: int, arguments: Sequence[str]) -> Part:
    """It logs itself when it is ready."""
    command = ("headpond", "sessions", *arguments, "--port", str(port), "--processes", "1")
    return Part(name=f"sessions-{port}", command=command, is_ready=lambda *_: False, stop_at_once=True)

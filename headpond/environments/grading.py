"""Scoring functions (judges) that may hang or crash, run in child processes: `graded`.

Each event loop has a `GraderPool` with at most one process per core; processes start on demand
and are reused. Callers wait for a free grader without a time limit; the limit covers the judge
alone. A killed grader loses only the call that it was running. Only JSON crosses the socket to
the child (`grader_child.py`).
"""

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from headpond.environments.grader_child import MAX_RESULT_BYTES
from headpond.environments.protocol import Score
from headpond.errors import InfrastructureFailure, PolicyFailure, StageError
from headpond.event_loop import offload
from headpond.event_loop.cancellation import run_to_completion
from headpond.processes.privacy import inherited_variables
from headpond.spans import timed

Ts = TypeVarTuple("Ts")
R = TypeVar("R")

# Most judges take milliseconds. A judge that takes seconds was caught by its input (catastrophic
# regular expressions).
TIMEOUT_S = 10.0
# Limit per call. One call per core may use it at the same time, beside hundreds of rollouts.
MEMORY_MB = 1024

CHILD = Path(__file__).with_name("grader_child.py")
# Importing a judge's module takes 0.1-2 s, ten times that on a busy machine. A longer import hangs.
IMPORT_TIMEOUT_S = 60.0
# A process that has closed its socket ends within milliseconds.
EXIT_TIMEOUT_S = 1.0
# Calls per process. A fresh process drops the memory that judges have leaked. That many calls share
# its start.
MAX_CALLS = 1_000
SIGNALS = {signum.value: signum.name for signum in signal.Signals}
# A judge's input does not cause these signals: the cause is lack of memory, or an operator.
EXTERNAL_SIGNALS = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
# Each grader has one thread. NumPy would otherwise start one per core in each grader.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


async def graded(
    judge: Callable[[*Ts], R], *arguments: *Ts, timeout_s: float = TIMEOUT_S, memory_mb: int = MEMORY_MB
) -> R:
    """Call `judge(*arguments)` in a process that is killed after `timeout_s`. `judge` is a plain
    function at the top level of a module. Its arguments are JSON values; it returns a JSON value
    or a Score without columns. Raises PolicyFailure if the call exceeds its time, memory or
    recursion depth, or crashes: catch it to score that case yourself. Raises StageError if the
    judge raises anything else."""
    call = JudgeCall.of(judge, arguments, timeout_s=timeout_s, memory_mb=memory_mb)
    pool = _pools.get(asyncio.get_running_loop()) or install()
    with timed("grading", judge.__name__):
        return await pool.grade(call)


def install(processes: int | None = None) -> "GraderPool":
    """Give the running loop its pool, by default with one process per core. The pool closes with
    the loop."""
    loop = asyncio.get_running_loop()
    pool = _pools[loop] = GraderPool(processes or offload.cores())

    def close() -> None:
        _pools.pop(loop, None)
        pool.close()

    offload.call_at_shutdown(close)
    return pool


# ProcessPoolExecutor is no alternative: it breaks as a whole when one process dies. A call to a
# grader takes 0.7 ms.
class GraderPool:
    """The graders of one event loop."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._threads = offload.Pool(name="graders", threads=processes)
        self._slots = asyncio.Semaphore(processes)
        self._idle: list[Grader] = []
        self._busy: set[Grader] = set()

    async def grade(self, call: "JudgeCall") -> Any:
        async with self._slots:
            grader = self._acquire()
            working = asyncio.create_task(self._threads.run(grader.grade, call))
            try:
                return await asyncio.shield(working)
            finally:
                try:
                    if not working.done():
                        await run_to_completion(asyncio.create_task(self._stop(grader, working)))
                finally:
                    self._release(grader)

    @property
    def pids(self) -> list[int]:
        return [pid for grader in (*self._idle, *self._busy) if (pid := grader.pid) is not None]

    def close(self) -> None:
        """Kill all graders. Runs in the thread that shuts down the loop's executor."""
        for grader in list(self._busy):
            grader.stop()
        for grader in self._idle:
            grader.kill()
        self._threads.shutdown()

    def _acquire(self) -> "Grader":
        """Return the most recently used grader: no more processes start than are needed."""
        while self._idle:
            grader = self._idle.pop()
            if grader.usable:
                break
            grader.kill()  # The grader was killed from outside while idle.
        else:
            grader = Grader()
        self._busy.add(grader)
        return grader

    def _release(self, grader: "Grader") -> None:
        self._busy.discard(grader)
        if grader.usable:
            self._idle.append(grader)
        else:
            grader.kill()

    async def _stop(self, grader: "Grader", working: "asyncio.Task[Any]") -> None:
        grader.stop()
        await asyncio.wait([working])
        await self._threads.run(grader.kill)  # The call may have completed just before `stop`.


_pools: dict[asyncio.AbstractEventLoop, GraderPool] = {}


@dataclass(frozen=True, kw_only=True)
class JudgeCall:
    module: str
    name: str
    arguments: Sequence[Any]
    timeout_s: float
    memory_mb: int

    @classmethod
    def of(
        cls, judge: Callable[..., Any], arguments: Sequence[Any], *, timeout_s: float, memory_mb: int
    ) -> "JudgeCall":
        module, name = getattr(judge, "__module__", ""), getattr(judge, "__qualname__", repr(judge))
        if module == "__main__" or getattr(sys.modules.get(module), name, None) is not judge:
            raise StageError(
                f"{name} cannot be a grader: its process must import it by name. Define it as a plain function at the "
                "top level of an importable module"
            )
        return cls(module=module, name=name, arguments=arguments, timeout_s=timeout_s, memory_mb=memory_mb)

    @property
    def judge(self) -> str:
        return f"{self.module}:{self.name}"

    def import_request(self) -> bytes:
        return json.dumps({"module": self.module, "name": self.name}).encode()

    def request(self) -> bytes:
        """Encode the call. Takes 2 ms per megabyte: call it in a thread."""
        limit = self.memory_mb << 20
        request = {"module": self.module, "name": self.name, "memory_bytes": limit, "arguments": self.arguments}
        try:
            return json.dumps(request).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise StageError(f"the arguments of the grader {self.judge} are not JSON-serializable: {error}") from error

    def result(self, response: dict[str, Any]) -> Any:
        match response:
            case {"value": value}:
                return value
            case {"score": score}:
                return Score(**score)
            case {"exhausted": "MemoryError"}:
                raise self.failure(f"needed more than {self.memory_mb} MB of memory")
            case {"exhausted": error}:
                raise self.failure(f"raised {error}")
            case {"policy": text}:
                raise PolicyFailure(text)
            case {"infrastructure": text}:
                raise InfrastructureFailure(text)
            case _:
                raise StageError(f"the grader {self.judge} failed: {response.get('bug')}")

    def failure(self, event: str) -> PolicyFailure:
        characters = sum(len(argument) for argument in self.arguments if isinstance(argument, str))
        return PolicyFailure(f"the grader {self.judge} {event}, given {characters:,} characters")


class ChildGone(Exception):
    """Raised when the child process closed its socket or sent something that is not a response."""


class Stopped(Exception):
    """Raised when `Grader.stop` was called during the call."""


class Grader:
    """One child process. Used by one thread at a time; `stop` may be called from any thread."""

    def __init__(self) -> None:
        self._socket, self._child_socket = socket.socketpair()
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd: int | None = None  # Readable when the process has ended.
        self._imported: set[str] = set()
        self._stopped = False
        self.calls = 0

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process else None

    @property
    def usable(self) -> bool:
        """Whether the process is running and ready for a call."""
        return self._process is not None and self.calls < MAX_CALLS and not self._stopped and not self._has_ended(0.0)

    def grade(self, call: JudgeCall) -> Any:
        """Return the judge's result. Blocks; the time limit starts after the judge's module is
        imported."""
        request = call.request()
        try:
            response = self._call(call, request)
        except BaseException:
            self.kill()  # The state of the process is unknown.
            raise
        if self.calls >= MAX_CALLS:
            self.kill()
        return call.result(response)

    def stop(self) -> None:
        """Abort a running `grade`, which raises Stopped after the process has been killed."""
        self._stopped = True
        with contextlib.suppress(OSError):  # The process has already ended.
            self._socket.shutdown(socket.SHUT_RDWR)

    def kill(self) -> int | None:
        """Kill the process group and return the exit code of the process."""
        process, self._process = self._process, None
        self._socket.close()
        self._child_socket.close()
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            # Before `wait`: until then the id cannot be reused.
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        if self._pidfd is not None:
            os.close(self._pidfd)
        return code

    def _call(self, call: JudgeCall, request: bytes) -> dict[str, Any]:
        self._start()
        if call.judge not in self._imported:
            self._import(call)
        self.calls += 1
        try:
            return self._exchange(request, call.timeout_s)
        except TimeoutError:
            raise call.failure(f"did not end within {call.timeout_s:g} s") from None
        except ChildGone:
            raise self._exit_error(call) from None

    def _import(self, call: JudgeCall) -> None:
        try:
            response = self._exchange(call.import_request(), IMPORT_TIMEOUT_S)
        except TimeoutError:
            problem = f"took longer than {IMPORT_TIMEOUT_S:g} s"
        except ChildGone:
            problem = "ended its process"
        else:
            if "value" in response:
                self._imported.add(call.judge)
                return
            if "bug" in response:
                raise StageError(f"the grader {call.judge} cannot be imported in its process: {response['bug']}")
            problem = f"failed: {response}"
        if self._stopped:
            raise Stopped
        raise InfrastructureFailure(f"importing {call.module} for its grader {call.name} {problem}")

    def _start(self) -> None:
        if self._process is not None:
            return
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(CHILD), str(os.getpid())],
                stdin=self._child_socket.fileno(),
                stdout=subprocess.DEVNULL,
                # Python's warnings quote the policy's text, up to megabytes of it.
                stderr=subprocess.DEVNULL,
                env={**ONE_THREAD, **inherited_variables()},
                process_group=0,
            )
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError as error:
            raise InfrastructureFailure(f"a grader's process could not be started: {error}") from error
        self._child_socket.close()
        with contextlib.suppress(OSError):  # The next exchange reports it.
            self._socket.sendall(json.dumps(sys.path).encode() + b"\n")

    def _exchange(self, request: bytes, timeout_s: float) -> dict[str, Any]:
        """Send a request and wait for its response. The timeout is the socket's: a busy loop
        cannot delay it."""
        deadline = time.monotonic() + timeout_s
        received = bytearray()
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(request + b"\n")
            while not received.endswith(b"\n"):
                self._socket.settimeout(max(deadline - time.monotonic(), 0.0))
                block = self._socket.recv(MAX_RESULT_BYTES)
                received += block
                if not block or len(received) > 2 * MAX_RESULT_BYTES:
                    raise ChildGone
            response = json.loads(received)
        except BlockingIOError:
            raise TimeoutError from None
        except (ConnectionError, ValueError) as error:
            raise ChildGone from error
        if not isinstance(response, dict) or len(response) != 1:
            raise ChildGone
        return response

    def _exit_error(self, call: JudgeCall) -> Exception:
        """Explain why the process is gone, as the exception to raise."""
        if self._stopped:
            return Stopped()
        exited = self._has_ended(EXIT_TIMEOUT_S)
        code = self.kill()
        if not exited or code is None:
            return call.failure("closed or misused its process's socket")
        name = SIGNALS.get(-code, f"signal {-code}")
        if code in EXTERNAL_SIGNALS:
            return InfrastructureFailure(
                f"the grader {call.judge} was killed from outside ({name}): check whether the machine is out of memory"
            )
        return call.failure(f"died of {name}" if code < 0 else f"ended its process with exit code {code}")

    def _has_ended(self, timeout_s: float) -> bool:
        assert self._pidfd is not None
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

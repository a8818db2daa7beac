"""One grader: a process that scores answers, and is killed with all that it started when it does not end in time.

Owns its process and what its ways to fail mean; `grading.py` decides who uses it when. Nothing but JSON crosses, over
a socket that only the two have. One thread at a time uses it; any may `stop` it.
"""

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
from typing import Any

from penstock.environments.grader_child import ANSWER_BYTES
from penstock.environments.programs import without_our_settings
from penstock.environments.scores import Score
from penstock.errors import InfrastructureFailure, PolicyFailure, StageError

CHILD = Path(__file__).with_name("grader_child.py")
# Imports of a judge's module take 0.1-2 s, ten times that on a busy machine: past this, something hangs.
IMPORT_S = 60.0
# A process that has closed its socket ends within milliseconds.
EXIT_S = 1.0
# What a judge leaks, or leaves lying about, goes with its process; one start is shared by so many answers.
USES = 1_000
SIGNALS = {each.value: each.name for each in signal.Signals}
# Nothing in an answer makes these: memory was short, or somebody tidied up.
FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
# One core each: with a thread for every core, each judge that imports NumPy would want the whole machine.
ONE_CORE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True)
class Call:
    module: str
    name: str
    arguments: Sequence[Any]
    timeout_s: float
    memory_mb: int

    @classmethod
    def of(cls, judge: Callable[..., Any], arguments: Sequence[Any], *, timeout_s: float, memory_mb: int) -> "Call":
        module, name = getattr(judge, "__module__", ""), getattr(judge, "__qualname__", repr(judge))
        if module == "__main__" or getattr(sys.modules.get(module), name, None) is not judge:
            raise StageError(
                f"{name} cannot be a grader: another process must find it by name. Make it a plain function at the top "
                "of a module that can be imported"
            )
        return cls(module=module, name=name, arguments=arguments, timeout_s=timeout_s, memory_mb=memory_mb)

    @property
    def judge(self) -> str:
        return f"{self.module}:{self.name}"

    def preparation(self) -> bytes:
        return json.dumps({"module": self.module, "name": self.name}).encode()

    def request(self) -> bytes:
        """2 ms for a megabyte: not for the loop."""
        limit = self.memory_mb << 20
        request = {"module": self.module, "name": self.name, "memory_bytes": limit, "arguments": self.arguments}
        try:
            return json.dumps(request).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise StageError(f"the grader {self.judge} gets what JSON has, nothing else: {error}") from error

    def failure(self, what: str) -> PolicyFailure:
        characters = sum(len(each) for each in self.arguments if isinstance(each, str))
        return PolicyFailure(f"the grader {self.judge} {what}, given {characters:,} characters")


class Gone(Exception):
    """Nothing more comes from the process."""


class Stopped(Exception):
    """Somebody else wanted it to end."""


class Grader:
    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: int | None = None
        """descriptor that can be read when the process has ended"""
        self._prepared: set[str] = set()
        self._stopped = False
        self.uses = 0

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process else None

    @property
    def usable(self) -> bool:
        """Whether it runs, and waits for a call."""
        return self._process is not None and self.uses < USES and not self._stopped and not self._has_ended(0.0)

    def grade(self, call: Call) -> Any:
        """What the judge returned. Blocks; the time limit begins when the judge's module is there."""
        request = call.request()
        try:
            answer = self._answer(call, request)
        except BaseException:
            self.end()  # nobody knows what it is doing
            raise
        if self.uses >= USES:
            self.end()
        return _outcome(call, answer)

    def stop(self) -> None:
        """Ends what it does; whoever is in `grade` gets Stopped, once the process is gone."""
        self._stopped = True
        with contextlib.suppress(OSError):  # it has ended by itself
            self._ours.shutdown(socket.SHUT_RDWR)

    def end(self) -> int | None:
        """Kills the process and its whole group; returns how it ended."""
        process, self._process = self._process, None
        self._ours.close()
        self._theirs.close()
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # before it is waited for: until then its id is nobody else's
        code = process.wait()
        if self._ended is not None:
            os.close(self._ended)
        return code

    def _answer(self, call: Call, request: bytes) -> dict[str, Any]:
        self._start()
        if call.judge not in self._prepared:
            self._prepare(call)
        self.uses += 1
        try:
            return self._ask(request, call.timeout_s)
        except TimeoutError:
            raise call.failure(f"did not end within {call.timeout_s:g} s") from None
        except Gone:
            raise self._death(call) from None

    def _prepare(self, call: Call) -> None:
        try:
            answer = self._ask(call.preparation(), IMPORT_S)
        except TimeoutError:
            what = f"took longer than {IMPORT_S:g} s"
        except Gone:
            what = "ended its process"
        else:
            if "value" in answer:
                self._prepared.add(call.judge)
                return
            if "bug" in answer:
                raise StageError(f"the grader {call.judge} cannot be imported in its process: {answer['bug']}")
            what = f"failed: {answer}"
        if self._stopped:
            raise Stopped
        raise InfrastructureFailure(f"importing {call.module} for its grader {call.name} {what}")

    def _start(self) -> None:
        if self._process is not None:
            return
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(CHILD), str(os.getpid())],
                stdin=self._theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # warnings quote the policy's text, by the megabyte
                env={**ONE_CORE, **without_our_settings()},
                process_group=0,
            )
            self._ended = os.pidfd_open(self._process.pid)
        except OSError as error:
            raise InfrastructureFailure(f"a grader's process could not be started: {error}") from error
        self._theirs.close()
        with contextlib.suppress(OSError):  # who asks next sees it
            self._ours.sendall(json.dumps(sys.path).encode() + b"\n")

    def _ask(self, request: bytes, timeout_s: float) -> dict[str, Any]:
        """TimeoutError is the kernel's word: a busy loop, or other threads, cannot make an answer late."""
        deadline = time.monotonic() + timeout_s
        received = bytearray()
        try:
            self._ours.settimeout(timeout_s)
            self._ours.sendall(request + b"\n")
            while not received.endswith(b"\n"):
                self._ours.settimeout(max(deadline - time.monotonic(), 0.0))
                block = self._ours.recv(ANSWER_BYTES)
                received += block
                if not block or len(received) > 2 * ANSWER_BYTES:
                    raise Gone
            answer = json.loads(received)
        except BlockingIOError:
            raise TimeoutError from None
        except (ConnectionError, ValueError) as error:
            raise Gone from error
        if not isinstance(answer, dict) or len(answer) != 1:
            raise Gone
        return answer

    def _death(self, call: Call) -> Exception:
        if self._stopped:
            return Stopped()
        by_itself = self._has_ended(EXIT_S)
        code = self.end()
        if not by_itself or code is None:
            return call.failure("closed or misused its process's socket")
        name = SIGNALS.get(-code, f"signal {-code}")
        if code in FROM_OUTSIDE:
            return InfrastructureFailure(f"the grader {call.judge} was ended from outside ({name}): is memory short?")
        return call.failure(f"died of {name}" if code < 0 else f"ended its process with exit code {code}")

    def _has_ended(self, patience_s: float) -> bool:
        assert self._ended is not None
        watched = select.poll()
        watched.register(self._ended, select.POLLIN)
        return bool(watched.poll(patience_s * 1000))


def _outcome(call: Call, answer: dict[str, Any]) -> Any:
    match answer:
        case {"value": value}:
            return value
        case {"score": score}:
            return Score(**score)
        case {"blown": "MemoryError"}:
            raise call.failure(f"needed more than {call.memory_mb} MB of memory")
        case {"blown": error}:
            raise call.failure(f"raised {error}")
        case {"policy": text}:
            raise PolicyFailure(text)
        case {"infrastructure": text}:
            raise InfrastructureFailure(text)
        case _:
            raise StageError(f"the grader {call.judge} failed: {answer.get('bug')}")

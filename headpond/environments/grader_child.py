"""The child process of a `Grader`: runs the judges that its parent names, one call at a time.

The program is started by path and imports only the standard library and the judges' own modules.
Requests and responses are lines of JSON on a socket passed as standard input. The process ends
when the socket closes or the thread that started it ends, even while a judge is running.
"""

import ctypes
import importlib
import json
import os
import resource
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, SIGKILL = 1, 9
# A score is about 30 numbers with their names.
MAX_RESULT_BYTES = 1 << 16
MAX_MESSAGE_CHARACTERS = 1_000


def main() -> None:
    _end_with(int(sys.argv[1]))
    # Crashing judges must not fill the disk with core dumps.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = os.dup(0)
    # A judge that reads standard input must not read requests.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with os.fdopen(channel, "rb") as requests, os.fdopen(channel, "wb", closefd=False) as responses:
        sys.path[:] = json.loads(requests.readline())
        for line in requests:
            responses.write(_respond(json.loads(line)).encode() + b"\n")
            responses.flush()


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends. A judge stuck in C code never
    reads the closed socket."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent ended before the grader started")


def _respond(request: dict[str, Any]) -> str:
    try:
        judge = getattr(importlib.import_module(request["module"]), request["name"])
        if "arguments" not in request:
            return json.dumps({"value": None})
        with _memory_limit(request["memory_bytes"]):
            response = json.dumps(_result(judge(*request["arguments"])), default=_plain)
        if len(response) > MAX_RESULT_BYTES:
            raise ValueError(f"it returned {len(response):,} bytes of JSON: the limit is {MAX_RESULT_BYTES:,}")
    except (MemoryError, RecursionError) as error:
        return json.dumps({"exhausted": type(error).__name__})
    except Exception as error:  # noqa: BLE001 - reported to the parent; the process can serve the next call
        return json.dumps({_error_kind(error): _error_message(error)})
    return response


def _result(returned: Any) -> dict[str, Any]:
    scores = sys.modules.get("headpond.environments.protocol")
    if scores is None or not isinstance(returned, scores.Score):
        return {"value": returned}
    if returned.columns:
        raise TypeError("a grader's score has no columns: add them in the environment, which has the tokens")
    return {"score": {"reward": returned.reward, "rewards": dict(returned.rewards), "metrics": dict(returned.metrics)}}


def _plain(number: Any) -> Any:
    """Convert NumPy scalars to Python numbers."""
    if not hasattr(number, "item"):
        raise TypeError(f"it returned a {type(number).__name__}: return a JSON value or a Score")
    return number.item()


def _error_kind(error: Exception) -> str:
    """Classify an error: a judge may raise the same failures as an environment."""
    errors = sys.modules.get("headpond.errors")
    if errors and isinstance(error, errors.PolicyFailure):
        return "policy"
    return "infrastructure" if errors and isinstance(error, errors.InfrastructureFailure) else "bug"


def _error_message(error: Exception) -> str:
    if _error_kind(error) != "bug":
        return str(error)[:MAX_MESSAGE_CHARACTERS]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:MAX_MESSAGE_CHARACTERS]} ({frame.filename}, line {frame.lineno})"


@contextmanager
def _memory_limit(more_bytes: int) -> Iterator[None]:
    """Limit the address space to `more_bytes` above the current use. Imports reserve gigabytes
    on machines with many cores. Memory that earlier calls left behind does not count against
    this call."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


if __name__ == "__main__":
    main()

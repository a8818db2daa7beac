"""The process of a grader: runs the judges that its parent names, on what its parent sends, one at a time.

Started by path, so that it imports nothing but the standard library and the judges' own modules. Requests and answers
are lines of JSON on the socket that it gets as standard input. It ends with that socket, or with the thread that
started it, whatever it is doing then.
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
# A score is some 30 numbers with their names.
ANSWER_BYTES = 1 << 16
TEXT_CHARACTERS = 1_000


def main() -> None:
    _end_with(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # what an answer brings down must not fill the disk
    channel = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a judge that reads its input must not read ours
    with os.fdopen(channel, "rb") as requests, os.fdopen(channel, "wb", closefd=False) as answers:
        sys.path[:] = json.loads(requests.readline())
        for line in requests:
            answers.write(_answer(json.loads(line)).encode() + b"\n")
            answers.flush()


def _end_with(parent: int) -> None:
    """A judge that hangs, in C perhaps, never sees the end of its socket: the kernel has to end it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent ended before the grader started")


def _answer(request: dict[str, Any]) -> str:
    try:
        judge = getattr(importlib.import_module(request["module"]), request["name"])
        if "arguments" not in request:
            return json.dumps({"value": None})
        with _memory(request["memory_bytes"]):
            answer = json.dumps(_told(judge(*request["arguments"])), default=_plain)
        if len(answer) > ANSWER_BYTES:
            raise ValueError(f"it returned {len(answer):,} bytes of JSON: at most {ANSWER_BYTES:,} are a score")
    except (MemoryError, RecursionError) as error:
        return json.dumps({"blown": type(error).__name__})
    except Exception as error:  # noqa: BLE001 - told to whoever asked, with its place; the next answer may be well
        return json.dumps({_kind(error): _text(error)})
    return answer


def _told(found: Any) -> dict[str, Any]:
    scores = sys.modules.get("penstock.environments.scores")
    if scores is None or not isinstance(found, scores.Score):
        return {"value": found}
    if found.columns:
        raise TypeError("a grader's score has no columns: make them where the tokens are")
    return {"score": {"reward": found.reward, "rewards": dict(found.rewards), "metrics": dict(found.metrics)}}


def _plain(number: Any) -> Any:
    """NumPy's numbers are what Python's are."""
    if not hasattr(number, "item"):
        raise TypeError(f"it returned a {type(number).__name__}: only what JSON has, or a Score, can travel")
    return number.item()


def _kind(error: Exception) -> str:
    """What an environment may raise it may raise here, too."""
    errors = sys.modules.get("penstock.errors")
    if errors and isinstance(error, errors.PolicyFailure):
        return "policy"
    return "infrastructure" if errors and isinstance(error, errors.InfrastructureFailure) else "bug"


def _text(error: Exception) -> str:
    if _kind(error) != "bug":
        return str(error)[:TEXT_CHARACTERS]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:TEXT_CHARACTERS]} ({frame.filename}, line {frame.lineno})"


@contextmanager
def _memory(more_bytes: int) -> Iterator[None]:
    """So much beyond what the process holds: imports reserve address space by the gigabyte where there are many cores,
    and what an earlier answer left behind is not this one's doing."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = held + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()

"""Every error that Headpond raises on purpose, and the boundary that turns errors of foreign code into them.

HeadpondError
 +-- ConfigError                 a setting is wrong; the message names file, line and the nearest setting
 +-- RunError                    a run cannot start or continue
 |    +-- RunLocked              another process holds the run or the Redis database
 |    +-- RunMismatch            the run directory belongs to another configuration
 |    +-- LedgerError            the ledger cannot be used here
 |         +-- IllegalTransition a state change that the transition table does not allow: a bug
 +-- BlobError
 |    +-- BlobMissing
 |    +-- BlobCorrupt
 |    +-- BlobUnwritten          the store cannot be written (disk full, permissions); retried
 +-- SessionError                carries the HTTP status of the session server's response
 |    +-- BadRequest 400, Unauthorised 401, NotFound 404, TooSlow 408, Busy 409, Expired 410, TooLarge 413,
 |    |   NothingToTrain 422, Invariant 500, Upstream 502, Full 503
 |    +-- ContextFull 400        a BadRequest: the conversation was truncated and cannot continue
 |    +-- Aborted 503            an Upstream: the engine ended the completion before the policy did
 +-- InfrastructureFailure       retried, counted towards `recovery.max_failures`
 |    +-- EngineUnreachable      retried, not counted: submission pauses
 +-- PolicyFailure               an error of the policy: scored, never retried
 +-- MalformedId                 a text is not the id that it should be
 +-- StageError                  a stage cannot process its input: a broken pipeline
 |    +-- OtherPlan              a step was encoded with other settings: it is formed again
 +-- BatchError                  an error of the trainer's reader
      +-- Stalled                no batch within the time limit; the message has the reason

Each takes one message argument, so that it survives JSON.
"""

import contextlib
import reprlib
import threading
import traceback
from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import TYPE_CHECKING, ClassVar, TypeVar

if TYPE_CHECKING:
    from headpond.replica_use import ReplicaUse

UNWRITTEN = 507  # HTTP status of a session server's response if the store cannot be written.
T = TypeVar("T")


class HeadpondError(Exception):
    # The ended rollout's use of the engine, by replica.
    replica_uses: "Mapping[str, ReplicaUse] | None" = None


class ConfigError(HeadpondError):
    pass


class RunError(HeadpondError):
    pass


class RunLocked(RunError):
    pass


class RunMismatch(RunError):
    pass


class LedgerError(RunError):
    pass


class IllegalTransition(LedgerError):
    pass


class BlobError(HeadpondError):
    pass


class BlobMissing(BlobError):
    pass


class BlobCorrupt(BlobError):
    pass


class BlobUnwritten(BlobError):
    pass


class SessionError(HeadpondError):
    status_code: ClassVar[int] = 500


class BadRequest(SessionError):
    status_code = 400


class ContextFull(BadRequest):
    pass


class Unauthorised(SessionError):
    status_code = 401


class NotFound(SessionError):
    status_code = 404


class TooSlow(SessionError):
    status_code = 408


class Busy(SessionError):
    status_code = 409


class Expired(SessionError):
    status_code = 410


class TooLarge(SessionError):
    status_code = 413


class NothingToTrain(SessionError):
    status_code = 422


class Invariant(SessionError):
    status_code = 500


class Upstream(SessionError):
    status_code = 502


class Aborted(Upstream):
    status_code = 503
    sampled_tokens: int = 0  # Tokens of the completion, which is thrown away.


class Full(SessionError):
    status_code = 503


class InfrastructureFailure(HeadpondError):
    pass


class EngineUnreachable(InfrastructureFailure):
    pass


class PolicyFailure(HeadpondError):
    pass


class MalformedId(HeadpondError):
    pass


class StageError(HeadpondError):
    pass


class OtherPlan(StageError):
    pass


class BatchError(HeadpondError):
    pass


class Stalled(BatchError):
    pass


def text_of(error: BaseException) -> str:
    """Return type and message, even of an error whose `__str__` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as failure:  # noqa: BLE001  foreign code
        return f"{type(error).__name__}: its text cannot be read ({type(failure).__name__})"


def sentence(text: str) -> str:
    """Add a full stop unless the text has an end: another sentence follows."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


@contextlib.contextmanager
def error_boundary(kind: type[HeadpondError], what: str, *passing: type[Exception]) -> Generator[None]:
    """Let Headpond's own errors and `passing` pass; convert any other exception, and SessionError,
    to `kind` with its file and line. `what` begins the message. Cancellation passes: see `in_own_task`."""
    try:
        yield
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, passing) or (isinstance(error, HeadpondError) and not isinstance(error, SessionError)):
            raise
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # Ctrl-C
        at = raised_at(error)
        # A SyntaxError of an imported module has file and line in its text.
        place = "" if at.startswith("<frozen importlib") else f" ({at})"
        raise kind(f"{what}: {text_of(error)}{place}") from error


async def in_own_task(kind: type[HeadpondError], what: str, call: Callable[[], Awaitable[T]]) -> T:
    """Await an environment's call inside an `error_boundary`. A separate task shows who
    cancelled: if the caller was not cancelled, the environment has cancelled itself, which is
    its error."""
    import asyncio  # The import takes 20 ms; commands that only print do without it.

    async def bounded() -> T:
        with error_boundary(kind, what):
            return await call()

    # A cancellation that the worker did not request is an error of the environment and counts, like
    # `sys.exit()`. As a released job it was repeated for ever: 640 attempts in 20 s.
    task = asyncio.create_task(bounded())
    try:
        return await task
    except asyncio.CancelledError as error:
        caller = asyncio.current_task()
        if caller is not None and caller.cancelling():
            raise
        raise kind(f"{what}: CancelledError: the environment cancelled its own task ({raised_at(error)})") from error


def described(result: object) -> str:
    """Describe foreign code's result for an error: bounded, with its type, and with its shape if
    it has one."""
    kind, shape = type(result).__name__, getattr(result, "shape", ())
    return f"{kind} of shape {shape}" if shape else f"{reprlib.repr(result)} ({kind})"


def raised_at(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}, line {frame.lineno}"


ERROR_CHARACTERS = 600  # Room for a cause and the remedy. The traceback stays in the worker's log.


def shortened(error: str, characters: int = ERROR_CHARACTERS) -> str:
    """Shorten a text for a message: at most `characters` long, with lone surrogates escaped."""
    error = error[: characters + 1].encode(errors="backslashreplace").decode()
    return error if len(error) <= characters else error[: characters - 1] + "…"

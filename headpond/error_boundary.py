"""Classifies exceptions where the code of an environment, an estimator or a filter is called."""

import asyncio
import contextlib
import reprlib
import threading
import traceback
from collections.abc import Awaitable, Callable, Generator
from typing import TypeVar

from headpond.errors import HeadpondError, SessionError, text_of

T = TypeVar("T")


@contextlib.contextmanager
def error_boundary(kind: type[HeadpondError], what: str) -> Generator[None]:
    """Let Headpond's own errors pass; convert any other exception, and SessionError, to `kind` with its file and line.
    `what` begins the message. Cancellation passes: see `in_own_task`."""
    try:
        yield
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, HeadpondError) and not isinstance(error, SessionError):
            raise
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # Ctrl-C
        at = raised_at(error)
        # A SyntaxError of an imported module, whose text has file and line.
        place = "" if at.startswith("<frozen importlib") else f" ({at})"
        raise kind(f"{what}: {text_of(error)}{place}") from error


async def in_own_task(kind: type[HeadpondError], what: str, call: Callable[[], Awaitable[T]]) -> T:
    """Await an environment's call inside an `error_boundary`. A task of its own tells whose a cancellation is: if the
    caller was not cancelled, the environment has cancelled itself, which is an error of it."""

    async def bounded() -> T:
        with error_boundary(kind, what):
            return await call()

    task = asyncio.create_task(bounded())
    try:
        return await task
    except asyncio.CancelledError as error:
        caller = asyncio.current_task()
        if caller is not None and caller.cancelling():
            raise
        raise kind(f"{what}: CancelledError: the environment cancelled its own task ({raised_at(error)})") from error


def described(result: object) -> str:
    """What such code returned, for an error: bounded, with the type, and with the shape where it has one."""
    kind, shape = type(result).__name__, getattr(result, "shape", ())
    return f"{kind} of shape {shape}" if shape else f"{reprlib.repr(result)} ({kind})"


def raised_at(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}, line {frame.lineno}"

"""Classifies exceptions where an environment's code is called."""

import contextlib
import traceback
from collections.abc import Generator

from penstock.errors import PenstockError, SessionError


@contextlib.contextmanager
def error_boundary(kind: type[PenstockError], what: str) -> Generator[None]:
    """Let Penstock's own errors pass; convert any other exception, and SessionError, to `kind` with its file and line.
    `what` begins the message."""
    try:
        yield
    except Exception as error:
        if isinstance(error, PenstockError) and not isinstance(error, SessionError):
            raise
        raise kind(f"{what}: {type(error).__name__}: {error} ({raised_at(error)})") from error


def raised_at(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}, line {frame.lineno}"

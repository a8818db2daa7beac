"""Where an environment's own code is called: whatever it raises gets a kind and says where it came from."""

import contextlib
import traceback
from collections.abc import Generator

from penstock.errors import PenstockError, SessionError


@contextlib.contextmanager
def boundary(kind: type[PenstockError], what: str) -> Generator[None]:
    """Failures that an environment may raise, or let through, pass; everything else is a fault of its own, a `kind`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, PenstockError) and not isinstance(error, SessionError):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}, line {frame.lineno}"
        raise kind(f"{what}: {type(error).__name__}: {error} ({where})") from error

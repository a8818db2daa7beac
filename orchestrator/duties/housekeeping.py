"""What holds up a run, and duties that report their errors while it goes on.

A run does not end for a file that cannot be used at present.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TypeVar

from headpond.errors import BlobError, LedgerError
from headpond.store import Store
from headpond.store.base import check_key

logger = logging.getLogger("headpond.housekeeping")
T = TypeVar("T", bound="Trouble")

LOGGED_EVERY_S = 10.0  # on a disk that is almost full, every other write succeeds


class Trouble:
    """One entry of a component: why it cannot do its work at present."""

    text: str | None = None


class Register:
    """What the components of a run have to report. Their order is that of construction."""

    def __init__(self) -> None:
        self._read: list[Callable[[], Iterable[str | None]]] = []

    def entry(self) -> Trouble:
        """Return a new entry, which its component writes."""
        return self.enter(Trouble())

    def enter(self, trouble: T) -> T:
        self._read.append(lambda: [trouble.text])
        return trouble

    def add(self, read: Callable[[], Iterable[str | None]]) -> None:
        """Call `read` for every status: its texts depend on the time or on other components."""
        self._read.append(read)

    def texts(self) -> list[str]:
        return [text for read in self._read for text in read() if text]


class Troubles(Register):
    """Why the run does not move as fast as it could, each with what to do. `notes`: what it does not wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.notes = Register()


class Reported(Trouble):
    """Context of a duty that may fail: its trouble is logged when it appears, and the duty is done again later."""

    def __init__(
        self,
        duty: str,
        then: str = "the run goes on, and it is tried again",
        errors: tuple[type[Exception], ...] = (OSError, BlobError, LedgerError),
        troubles: Register | None = None,
    ) -> None:
        """`duty` completes "cannot ..."; `then` is what to do, or what follows; other errors than `errors` pass."""
        self._duty = duty
        self._then = then
        self._errors = errors
        self._logged_at = -math.inf
        if troubles:
            troubles.enter(self)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self.text = None
            return False
        if not isinstance(error, self._errors):
            return False
        before, self.text = self.text, f"cannot {self._duty} ({error}): {self._then}"
        if before is None and time.monotonic() - self._logged_at > LOGGED_EVERY_S:
            self._logged_at = time.monotonic()
            logger.warning("action=duty_failed %s", self.text)
        return True


def delete(store: Store, keys: Iterable[str]) -> None:
    for key in keys:
        with Reported(f"delete {key}"):
            check_key(key)  # it comes from a worker's reply
            store.delete(key)

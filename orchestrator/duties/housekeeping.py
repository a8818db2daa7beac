"""Duties that report their errors while the run goes on: it does not end for a file that cannot be used at present."""

import logging
from collections.abc import Iterable
from types import TracebackType

from headpond.errors import BlobError, LedgerError
from headpond.store import Store
from headpond.store.base import check_key

logger = logging.getLogger("headpond.housekeeping")


class Reported:
    """Context of a duty that may fail: its trouble is logged when it appears, and the duty is done again later."""

    def __init__(
        self,
        duty: str,
        then: str = "the run goes on, and it is tried again",
        errors: tuple[type[Exception], ...] = (OSError, BlobError, LedgerError),
    ) -> None:
        """`duty` completes "cannot ..."; `then` is what to do, or what follows; other errors than `errors` pass."""
        self._duty = duty
        self._then = then
        self._errors = errors
        self.trouble: str | None = None
        """why it cannot be done at present"""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self.trouble = None
            return False
        if not isinstance(error, self._errors):
            return False
        before, self.trouble = self.trouble, f"cannot {self._duty} ({error}): {self._then}"
        if before is None:
            logger.warning("action=duty_failed %s", self.trouble)
        return True


def delete(store: Store, keys: Iterable[str]) -> None:
    for key in keys:
        with Reported(f"delete {key}"):
            check_key(key)  # it comes from a worker's reply
            store.delete(key)

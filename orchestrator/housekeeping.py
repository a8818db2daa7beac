"""Housekeeping, which deletes what nothing reads, reports its errors and goes on: a run does not end for a file."""

import logging
from collections.abc import Iterable
from types import TracebackType

from headpond.errors import BlobError, LedgerError
from headpond.store import Store
from headpond.store.base import check_key

logger = logging.getLogger("headpond.housekeeping")


class Reported:
    """Context of a duty that may fail: the error is logged when it appears or changes, and the duty is done later."""

    def __init__(self, duty: str) -> None:
        self._duty = duty
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
        if not isinstance(error, OSError | BlobError | LedgerError):
            return False
        trouble = f"cannot {self._duty} ({error}); the run goes on, and it is tried again"
        if trouble != self.trouble:
            logger.warning("action=housekeeping_failed %s", trouble)
        self.trouble = trouble
        return True


def delete(store: Store, keys: Iterable[str]) -> None:
    for key in keys:
        with Reported(f"delete {key}"):
            check_key(key)  # it comes from a worker's reply
            store.delete(key)

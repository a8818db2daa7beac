"""Points in the write-ahead order where a test makes the orchestrator kill itself (`headpond.config.test_hooks`)."""

import os
import signal

from headpond.errors import ConfigError

POINTS = (
    "planned",  # groups are in the ledger, nothing is submitted
    "submitted",  # the jobs are submitted in the ledger, nothing is published
    "published",  # published, and nothing else has happened
    "replies_read",  # replies are read, their effects are not committed
    "replies_committed",  # committed, the stream is not trimmed
    "composed",  # the step is in the ledger, its batch phase or its encoding is not submitted
    "estimated",  # the result of its batch phase is in the ledger, its encoding is not submitted
    "encoded",  # every rank has replied, there is no manifest
    "sealed",  # the manifest is on disk, the step is not delivered in the ledger
    "delivered",  # the step is delivered in the ledger
)
_countdown: dict[str, int] = {}


def arm(crash_at: str | None) -> None:
    _countdown.clear()
    if crash_at:
        point, _, times = crash_at.partition(":")
        if point not in POINTS:
            raise ConfigError(f"testing.crash_at: there is no point {point!r}; there are: {', '.join(POINTS)}")
        _countdown[point] = int(times or 1)


def passed(point: str) -> None:
    if point in _countdown:
        _countdown[point] -= 1
        if _countdown[point] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

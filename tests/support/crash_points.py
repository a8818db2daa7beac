"""Kills an orchestrator where a test wants it: `cluster.orchestrator(CRASH_AT="planned")`.

`planned:2` kills it when it passes this point for the second time.
"""

import os
import signal

from headpond.orchestrator.duties import crash_points

VARIABLE = "CRASH_AT"


def install(crash_at: str) -> None:
    """Kill this process at the point. Call it before the run starts."""
    crash_point, _, times = crash_at.partition(":")
    assert crash_point in crash_points.POINTS, f"there is no point {crash_point!r}"
    left = int(times or 1)

    def passed(point: str) -> None:
        nonlocal left
        left -= point == crash_point
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    crash_points.passed = passed

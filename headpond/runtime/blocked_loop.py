"""What a worker says whose event loop does not tick: for the log, the status and `headpond why`."""

import sys

from headpond.runtime.loop_lag import blocker_name

PLACE_CHARACTERS = 300


def place(thread: int) -> str:
    """What the thread executes: `FUNCTION (FILE:LINE)`."""
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    return shown(blocker_name(frame)) if frame else "an unknown place"


def cause(node: str, blocked_s: object, blocked_at: object) -> str:
    """What a run waits for. The last two are what the worker says."""
    for_s = f"{blocked_s:.0f}" if isinstance(blocked_s, int | float) else "some"
    return (
        f"the event loop of worker {shown(node)} has been blocked for {for_s} s by {shown(str(blocked_at))}, and its "
        "rollouts count as lost: call what blocks there through `await asyncio.to_thread(...)` or `await graded(...)`, "
        "or use an async library, and restart the worker"
    )


def shown(text: str) -> str:
    """In one line, without control characters; of a long text its end, which has the file's name and the line."""
    return "".join(char if char.isprintable() else "?" for char in text[-PLACE_CHARACTERS:])

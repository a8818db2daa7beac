"""Where the code of an event loop is that does not tick, for the log, the status and `penstock why`."""

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[2]
OWN = tuple(f"{ROOT / package}/" for package in ("penstock", "tasks", "workers"))
INSTALLED = tuple(f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib"))
STDLIB = (*(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")), "<frozen ")
PLACE_CHARACTERS = 300


def place(thread: int) -> str:
    """`FILE:LINE (FUNCTION)` that the thread executes: the innermost one of the user's code, else of an installed
    package, else of Penstock."""
    innermost = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    if innermost is None:
        return "an unknown place"
    frame = min(_outwards(innermost), key=_distance)
    return shown(f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})")


def cause(node: str, blocked_s: object, blocked_at: object) -> str:
    """What a run waits for. The last two are what the worker says."""
    for_s = f"{blocked_s:.0f}" if isinstance(blocked_s, int | float) else "some"
    return (
        f"the event loop of worker {shown(node)} has been blocked for {for_s} s at {shown(str(blocked_at))}, and its "
        "rollouts count as lost: call what blocks there through `await asyncio.to_thread(...)` or `await graded(...)`, "
        "or use an async library, and restart the worker"
    )


def shown(text: str) -> str:
    """In one line, without control characters; of a long text its end, which has the file's name and the line."""
    return "".join(char if char.isprintable() else "?" for char in text[-PLACE_CHARACTERS:])


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _distance(frame: FrameType) -> int:
    """From the user's code."""
    file = frame.f_code.co_filename
    if file.startswith(OWN):
        return 2
    if file.startswith(INSTALLED):  # may be inside the standard library's directory
        return 1
    return 3 if file.startswith(STDLIB) else 0

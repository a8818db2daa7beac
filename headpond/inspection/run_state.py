"""Whether a run is alive, by its directory alone: the last status.json, its age, and the lock of its orchestrator."""

import fcntl
import socket
import time
from enum import StrEnum
from pathlib import Path

from pydantic import ValidationError

from headpond.records.status import Status

SILENT_S = 10.0  # ten statuses are missing
# in the run directory: data of a Redis that `headpond up` starts and ends with the run
OWN_REDIS = "redis"


class State(StrEnum):
    NOT_BEGUN = "not begun"  # its directory has no run.json
    STARTING = "starting"
    RUNNING = "running"
    SILENT = "silent"  # its process exists but writes no status
    STOPPED = "stopped"
    DONE = "done"


def last_status(directory: Path) -> Status:
    """The last status of the run; one without a time before the first. One that cannot be read says so in its notes."""
    path = directory / "status.json"
    try:
        content, at = path.read_bytes(), path.stat().st_mtime
    except OSError:
        return Status()
    try:
        return Status.model_validate_json(content)
    except ValidationError as error:
        where, why = ".".join(map(str, error.errors()[0]["loc"])), error.errors()[0]["msg"]
        note = f"{path} is damaged, or of another release of Headpond ({f'{where}: ' * bool(where)}{why})"
        return Status(at=at, phase="unknown", notes=[note])


def status_age_s(last: Status) -> float | None:
    return round(max(0.0, time.time() - last.at), 1) if last.at is not None else None


def state_of(directory: Path, last: Status, *, held_elsewhere: bool = False) -> State:
    """`held_elsewhere`: Redis says that an orchestrator has the run, which may be on another host."""
    other_host = last.process is not None and last.process.host != socket.gethostname()
    if is_locked(directory / "lock", if_unreadable=False) or (other_host and held_elsewhere):
        age_s = status_age_s(last)
        if age_s is None:
            return State.STARTING
        return State.SILENT if age_s > SILENT_S else State.RUNNING
    return State.DONE if last.phase == "done" else State.STOPPED


def owns_redis(directory: Path) -> bool:
    """If so, it ends with the run, and `headpond up` resumes both."""
    return (directory / OWN_REDIS).is_dir()


def why_idle(directory: Path, state: State, last: Status) -> list[str]:
    """Why a run that does not report itself makes no progress."""
    match state:
        case State.SILENT:
            why = "it is paused, it hangs (kill -USR1 PID logs its stacks), or its disk is full"
            return [f"the orchestrator has written no status for {status_age_s(last) or 0.0:.0f} s: {why}"]
        case State.STOPPED:
            ended = {"running": "its process has died", None: "it has not started working yet"}
            why = last.stopped_by or ended.get(last.phase, "it was stopped")
            # An error may have cost rollouts before it stopped the run.
            kept = "open rollouts are kept" if last.stopped_by else "nothing is lost"
            command = "headpond up" if owns_redis(directory) else "headpond run"
            return [f"the orchestrator is not running ({why}): {kept}, `{command}` resumes the run"]
        case _:
            return []


def is_locked(path: Path, *, if_unreadable: bool) -> bool:
    """Whether a process holds the lock of a file; `if_unreadable` if that cannot be found out."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return if_unreadable
    return False

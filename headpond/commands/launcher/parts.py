"""The processes of a run: the command of each, how it is found to be ready, and what its end means."""

import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from headpond.broker.queues import WorkerKind
from headpond.config import RunConfig
from headpond.errors import ConfigError
from headpond.inspection.why import why_silent

LISTENING = re.compile(r"action=sessions_ready url=(http://\S+)")
ANSWER_S = 0.5  # of a server on this machine, which is asked whether it is there
SLOTS_MOST = 256  # rollouts at once in one worker
COMPUTE_MOST = 4  # processes of the compute worker: a group takes milliseconds
# A free port replaces it in `engine.command`.
PORT = "{port}"
# The directory of the run replaces it in `trainer.command`.
RUN_DIR = "{run_dir}"


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    command: tuple[str, ...]
    # called with the output of its present process and the time at which this was started
    is_ready: Callable[[str, float], bool]
    # when it may end: never; with exit code 0; the orchestrator, whose refusals end the run
    # too
    ends: Literal["never", "done", "run"] = "never"
    # a process of Headpond: others see no HEADPOND_* variables, which hold addresses with
    # passwords
    own: bool = True
    stop_at_once: bool = False  # SIGQUIT stops it at once: a worker gives its jobs back


def engine(settings: RunConfig, url: str, port: int | None) -> Part:
    """The engine may be any program: it is ready when `url` answers. `port` replaces `{port}` in its command."""
    command = _words("engine.command", (settings.engine.command or "").replace(PORT, str(port)))
    return Part(name="engine", command=command, is_ready=lambda *_: answers(url), own=False)


def trainer(settings: RunConfig) -> Part:
    words = _words("trainer.command", settings.trainer.command or "")
    command = tuple(word.replace(RUN_DIR, str(settings.run_dir)) for word in words)

    def has_opened(_: str, since: float) -> bool:
        try:
            return (settings.run_dir / "trainer" / "rank_00.json").stat().st_mtime >= since
        except OSError:
            return False

    return Part(name="trainer", command=command, is_ready=has_opened, ends="done", own=False)


def sessions(port: int) -> Part:
    command = ("headpond", "sessions", "--port", str(port))
    return Part(name="sessions", command=command, is_ready=lambda output, _: bool(LISTENING.search(output)))


def orchestrator(has_status: Callable[[float], bool]) -> Part:
    return Part(
        name="orchestrator", command=("headpond", "run"), is_ready=lambda _, since: has_status(since), ends="run"
    )


def dashboard(run_dir: str, port: int) -> Part:
    command = ("headpond", "dashboard", run_dir, "--port", str(port))
    return Part(name="dashboard", command=command, is_ready=lambda *_: answers(f"http://127.0.0.1:{port}"))


def workers(settings: RunConfig, number: int, cores: int) -> list[Part]:
    slots = min(settings.rollouts.max_in_flight, SLOTS_MOST)
    names = [f"rollouts-{index}" for index in range(1, number + 1)] if number > 1 else ["rollouts"]
    compute = _worker("compute", WorkerKind.COMPUTE, max(1, min(cores, COMPUTE_MOST)))
    return [*(_worker(name, WorkerKind.ROLLOUTS, slots) for name in names), compute]


def _worker(name: str, kind: WorkerKind, slots: int) -> Part:
    options = ("-Q", ",".join(kind.queues), "-c", str(slots), "-l", "INFO")
    return Part(
        name=name,
        command=("celery", "-A", f"headpond.workers.{kind}", "worker", *options),
        is_ready=lambda output, _: "action=worker_ready" in output,
        stop_at_once=True,
    )


def _words(setting: str, command: str) -> tuple[str, ...]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"{setting} = {command!r} is not a command: {error}") from error
    if not words:
        raise ConfigError(f"{setting} is empty: write a command, or remove the setting")
    return (sys.executable if words[0] in ("python", "python3") else words[0], *words[1:])


def answers(url: str) -> bool:
    """Whether a server is there, whatever its response."""
    return why_silent(url, timeout_s=ANSWER_S) is None

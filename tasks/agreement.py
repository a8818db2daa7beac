"""What a run's orchestrator and its workers agree on before a job starts: the settings that the job's queue uses.

The orchestrator publishes them, and puts their digest and the names of the workers that failed a job into the message's
headers. A worker whose own digest differs, or that is named there, declines the job.
"""

import hashlib
import os
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from celery import current_task
from pydantic import Field, ValidationError

from headpond import ids
from headpond.broker.queues import WorkerKind
from headpond.config import RunConfig
from headpond.config.declared import settings_used_by
from headpond.errors import shortened
from headpond.records.wire import WireModel
from headpond.version import release

SETTINGS_HEADER = "headpond_settings"
FAILED_BY_HEADER = "headpond_failed_by"
NODE_CHARACTERS = 128
DIFFERENCES_SHOWN = 4
VERSION = "version of Headpond"
RESTART = "Restart it with the run's version and settings"

# of the message whose body runs in this task; set by the asyncio pool
headers: ContextVar[Mapping[str, Any] | None] = ContextVar("headers", default=None)


def message_headers() -> Any:
    """Of the message that is being executed. Anything with `get`."""
    of_task = headers.get()
    return of_task if of_task is not None else current_task.request if current_task else {}


def used_settings(config: RunConfig, kind: WorkerKind) -> dict[str, Any]:
    """What a worker of `kind` must have in common with its run."""
    return {VERSION: release(), **settings_used_by(config, kind.value)}


def digest(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(settings, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def differences(run: Mapping[str, Any], worker: Mapping[str, Any]) -> str:
    """`advantages.estimator is 'rloo' in the run, 'grpo' in this worker; ...`; environments first."""
    other = [name for name in run.keys() | worker.keys() if run.get(name) != worker.get(name)]
    other.sort(key=lambda name: (not name.startswith("environments."), name))
    texts = [f"{name} is {_shown(run, name)} in the run, {_shown(worker, name)} in this worker" for name in other]
    more = [f"and {len(texts) - DIFFERENCES_SHOWN} more"] if len(texts) > DIFFERENCES_SHOWN else []
    return "; ".join([*texts[:DIFFERENCES_SHOWN], *more])


def _shown(settings: Mapping[str, Any], name: str) -> str:
    return shortened(repr(settings[name]), 80) if settings.get(name) is not None else "unset"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Of a worker, in its replies."""

    node: str  # Celery's name of the worker: a prefork worker has one for all its processes
    settings: str  # digest

    def declines(self, sent: Any) -> str | None:
        """Why a message with the headers `sent` is not executed here."""
        run_settings = sent.get(SETTINGS_HEADER)
        if run_settings and run_settings != self.settings:
            return "this worker has other settings than the run"
        if self.node in (sent.get(FAILED_BY_HEADER) or ()):
            return "the job has failed on this worker before"
        return None


node: str | None = None  # of this process, if it is a worker; set at its start


def identity(config: RunConfig, kind: WorkerKind) -> Identity:
    name = node or str(ids.WorkerId.of_this_process())
    return Identity(node=name[:NODE_CHARACTERS], settings=digest(used_settings(config, kind)))


class Presence(WireModel):
    """What a worker says of itself once a second, in the hash `redis_keys.WORKERS`."""

    kind: WorkerKind
    pid: int = Field(default_factory=os.getpid)
    settings: str
    beat: int
    running: int  # jobs at this moment
    refused: str | None = None  # why it takes no jobs, if its settings are not the run's
    blocked_s: float | None = None  # since when its event loop does not tick; None while it does
    blocked_at: str | None = None  # `FUNCTION (FILE:LINE)`

    @classmethod
    def read(cls, content: bytes) -> "Presence | None":
        """None if a worker of another release has written something else."""
        try:
            return cls.model_validate_json(content)
        except ValidationError:
            return None


class Order(WireModel):
    """What the orchestrator tells a worker whose jobs fail, in the hash `redis_keys.ORDERS`."""

    slots: Literal[0, 1]  # jobs at once: none in quarantine, one in a trial
    why: str

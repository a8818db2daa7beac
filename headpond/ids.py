"""The ids of runs, groups, rollouts, jobs, tasks, leases and workers: every format is written and parsed here only.

run, execution    12 hexadecimal digits
group             g0000012                             by its ordinal, in the order of planning
rollout           g0000012-3                           its group and its number there; also the id of its job
other jobs        g0000012-filter, s000004f1r0, ...    of a group; of a step's formation (and data rank); ...
task              <run>.<job>.<attempt>                one submission of a job: the id of its Celery task
lease             <run>.<job>.<attempt>.<execution>    one execution of a task, a field in Redis
lease's value     <worker>:<beat>                      the beat changes with every renewal
worker            <host>-<pid>
files             rollouts/<run>/<rollout>/<attempt>.<execution>    directory of an execution's files in the store

No part of a task's id contains a dot. `parse` refuses a malformed id with MalformedId; `match` returns None for it, for
readers of Redis, where other programs may have written.
"""

import os
import re
import socket
import uuid
from typing import NamedTuple, Self

from headpond.errors import MalformedId

ROLLOUTS_FOLDER = "rollouts"
SESSIONS_FOLDER = "sessions"  # A store has one directory for each session server.
OWNER_KEY = "run"  # A store's entry with the id of the run that it belongs to.
# Files of an execution or a session.
COLUMNS_FILE, EXPERTS_FILE = "columns.safetensors", "experts.safetensors"

NUMBER = "(0|[1-9][0-9]*)"
GROUP = re.compile(r"g([0-9]{7,})")
ROLLOUT = re.compile(rf"([^.]+)-{NUMBER}")
ENCODE_JOB = re.compile(rf"s([0-9]{{6,}})f{NUMBER}r{NUMBER}")
TASK = re.compile(rf"([^.]+)\.([^.]+)\.{NUMBER}")
LEASE = re.compile(rf"{TASK.pattern}\.([^.]+)")
LEASE_VALUE = re.compile(rf"([^@]+):{NUMBER}(?:@(.+))?")
EXECUTION = re.compile(rf".*/{NUMBER}\.([^./]+)/[^/]+")
WORKER = re.compile(rf"(.+)-{NUMBER}")


def new_run() -> str:
    return uuid.uuid4().hex[:12]


def new_execution() -> str:
    return uuid.uuid4().hex[:12]


class GroupId(NamedTuple):
    ordinal: int

    def __str__(self) -> str:
        return f"g{self.ordinal:07d}"

    @classmethod
    def parse(cls, text: str) -> Self:
        if matched := GROUP.fullmatch(text):
            return cls(int(matched[1]))
        raise MalformedId(f"{text!r} is not the id of a group, such as g0000012")


class RolloutId(NamedTuple):
    group: str
    number: int  # The rollout's index in the group.

    def __str__(self) -> str:
        return f"{self.group}-{self.number}"

    @classmethod
    def match(cls, text: str) -> Self | None:
        matched = ROLLOUT.fullmatch(text)
        return cls(matched[1], int(matched[2])) if matched else None

    @classmethod
    def parse(cls, text: str) -> Self:
        if matched := cls.match(text):
            return matched
        raise MalformedId(f"{text!r} is not the id of a rollout, such as g0000012-3")


def survey_job(epoch: int, environment: str) -> str:
    """Name a survey. `epoch` counts the starts of the run's orchestrator: a survey that died is
    not repeated under the same id."""
    return f"e{epoch}-{environment}"


def group_job(group: str, stage: str) -> str:
    return f"{group}-{stage}"


def step_job(step: int, formation: int, stage: str) -> str:
    return f"s{step:06d}f{formation}-{stage}"


def draw_job(number: int, environment: str) -> str:
    return f"d{number}-{environment}"


class EncodeJobId(NamedTuple):
    step: int
    formation: int
    data_rank: int

    def __str__(self) -> str:
        return f"s{self.step:06d}f{self.formation}r{self.data_rank}"

    @classmethod
    def match(cls, text: str) -> Self | None:
        matched = ENCODE_JOB.fullmatch(text)
        return cls(*map(int, matched.groups())) if matched else None

    @classmethod
    def parse(cls, text: str) -> Self:
        if matched := cls.match(text):
            return matched
        raise MalformedId(f"{text!r} is not the id of an encoding job, such as s000004f1r0")


class TaskId(NamedTuple):
    run: str
    job: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.run}.{self.job}.{self.attempt}"

    @classmethod
    def match(cls, text: str) -> Self | None:
        matched = TASK.fullmatch(text)
        return cls(matched[1], matched[2], int(matched[3])) if matched else None


class LeaseId(NamedTuple):
    run: str
    job: str
    attempt: int
    execution: str

    def __str__(self) -> str:
        return f"{self.task}.{self.execution}"

    @property
    def task(self) -> TaskId:
        return TaskId(self.run, self.job, self.attempt)

    @classmethod
    def match(cls, text: str) -> Self | None:
        matched = LEASE.fullmatch(text)
        return cls(matched[1], matched[2], int(matched[3]), matched[4]) if matched else None


class LeaseValue(NamedTuple):
    worker: str
    beat: int
    replica: str | None = None  # The engine's replica that a request of the rollout waits for.

    def __str__(self) -> str:
        return f"{self.worker}:{self.beat}{f'@{self.replica}' if self.replica else ''}"

    @classmethod
    def match(cls, text: str) -> Self | None:
        matched = LEASE_VALUE.fullmatch(text)
        return cls(matched[1], int(matched[2]), matched[3]) if matched else None


class WorkerId(NamedTuple):
    host: str
    pid: int

    def __str__(self) -> str:
        return f"{self.host}-{self.pid}"

    @classmethod
    def of_this_process(cls) -> Self:
        return cls(socket.gethostname(), os.getpid())

    @classmethod
    def parse(cls, text: str) -> Self:
        if matched := WORKER.fullmatch(text):
            return cls(matched[1], int(matched[2]))
        raise MalformedId(f"{text!r} is not the id of a worker, such as host-4711")


def engine_session(rollout: str, attempt: int) -> str:
    """Return the value of the X-Session-ID header: the requests of one attempt belong together."""
    return f"{rollout}.{attempt}"


def run_directory(run: str) -> str:
    return f"{ROLLOUTS_FOLDER}/{run}"


def rollout_directory(run: str, rollout: str) -> str:
    return f"{run_directory(run)}/{rollout}"


def execution_directory(run: str, rollout: str, attempt: int, execution: str) -> str:
    """Name an execution's own directory: no execution overwrites the files of another."""
    return f"{rollout_directory(run, rollout)}/{attempt}.{execution}"


def execution_of(key: str) -> tuple[int, str] | None:
    """Return the (attempt, execution) that wrote a file in an execution's directory."""
    matched = EXECUTION.fullmatch(key)
    return (int(matched[1]), matched[2]) if matched else None

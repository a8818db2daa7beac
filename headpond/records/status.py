"""What a run reports of itself once a second: the content of `status.json`.

The orchestrator writes it; commands, dashboard, benchmarks and tests read it. A field that an older release did not
write has its default, which means "unknown" or "nothing".
"""

from typing import Any

from pydantic import BaseModel, ConfigDict


class Process(BaseModel):
    host: str
    pid: int


class Status(BaseModel):
    model_config = ConfigDict(frozen=True)

    run: str = ""
    phase: str | None = None  # running, draining, stopping or done
    stopped_by: str | None = None  # the error that ended the run
    process: Process | None = None
    at: float | None = None  # None before the first status of a run
    http: str | None = None  # address of the orchestrator's HTTP endpoint
    running_s: float = 0.0
    step: int = 0  # delivered steps
    steps: int = 0
    policy_version: int = 0
    rollouts: dict[str, Any] = {}  # `queries.balance`
    replies_refused: int = 0
    states: dict[str, int] = {}
    rollouts_per_s: float = 0.0
    tokens_per_s: float = 0.0
    waiting_jobs: dict[str, int] = {}
    submitted_jobs: dict[str, int] = {}
    queued: dict[str, int] = {}
    running_by_worker: dict[str, int] = {}
    excluded_workers: dict[str, str] = {}  # workers that take no jobs -> why
    # workers that are listed and report nothing -> for how many seconds
    silent_workers: dict[str, float] = {}
    # URL -> its weights, whether it serves, its load, what it gave and cost
    replicas: dict[str, dict[str, Any]] = {}
    stored_bytes: int = 0
    # why the run does not move as fast as it could, each with what to do
    waiting_for: list[str] = []
    losses: dict[str, Any] = {}  # `Causes.recent`
    next_step: dict[str, Any] = {}  # `orchestrator/reporting/next_step.py`
    notes: list[str] = []  # what to know although the run does not wait for it
    evaluations: dict[str, Any] = {}  # `Evaluations.status`
    event_loop_lag: dict[str, Any] = {}  # the orchestrator's `LagSummary`
    other_loops: dict[str, dict[str, Any]] = {}

"""The configuration of a run and its workers: TOML, then `PENSTOCK_*` variables, then flags.

The only reader of the environment. Every process reads the same file; a wrong key or value is reported with
file, line and the nearest right key.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from penstock.advantages import AdvantageSettings
from penstock.config.engine import Engine, EnvironmentName, EnvironmentSettings, Policy
from penstock.config.problems import Keys, Origins, describe, is_setting, unknown_variable
from penstock.config.redis_address import check
from penstock.config.sections import Section, Share
from penstock.config.sessions import Sessions
from penstock.errors import ConfigError
from penstock.filters import FilterSettings
from penstock.packing import Normalise, PackingRules
from penstock.runtime.loop_lag import LagLimits, LagTrace, LoopLag, Publish

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
PREFIX = "PENSTOCK_"
CONFIG_VARIABLE = "PENSTOCK_CONFIG"
REDIS_VARIABLE = "PENSTOCK_REDIS_URL"


class Rollouts(Section):
    group_size: Annotated[int, Field(ge=1, le=64)] = 8
    """64 at most: a group's verdicts travel in one small reply"""
    min_group_size: PositiveInt | None = None
    """a group with fewer finished rollouts is dropped; default max(2, half the group)"""
    max_in_flight: PositiveInt = 1024
    """rollouts planned and not yet generated: bounds queue, ledger memory and the engine's backlog"""
    timeout_s: PositiveFloat = 3600.0
    group_timeout_s: PositiveFloat = 7200.0
    """after this long a group goes on without the rollouts that are still out"""
    partial_groups: Literal["train", "wait", "drop"] = "train"
    """a group of which some rollouts died or timed out: train on the rest, wait for all, or drop it"""
    oversample: Annotated[float, Field(ge=1)] = 1.0
    """groups begun for every group that the coming steps need: for when many are dropped"""
    graders: PositiveInt | None = None
    """processes of a worker that score answers (`graded`); default: as many as its cores"""

    @property
    def smallest_group(self) -> int:
        return self.min_group_size or min(self.group_size, max(2, -(-self.group_size // 2)))

    @model_validator(mode="after")
    def _fits(self) -> "Rollouts":
        if self.max_in_flight < self.group_size:
            raise ValueError(f"max_in_flight ({self.max_in_flight}) must hold one group ({self.group_size})")
        if self.smallest_group > self.group_size:
            raise ValueError(f"min_group_size ({self.smallest_group}) is larger than group_size ({self.group_size})")
        return self


class BatchSettings(Section):
    unit: Literal["groups", "rollouts", "tokens"] = "groups"
    size: PositiveInt = 16
    order: Literal["planned-window", "completion"] = "planned-window"
    window: Annotated[float, Field(ge=1)] = 2.0
    """a batch takes from the first `window` batches' worth of open groups: early ones are not just the short ones"""
    max_empty_batches: PositiveInt = 10
    """the run stops after this many batches' worth of groups in a row were dropped"""
    data_ranks: PositiveInt = 1
    seq_len: PositiveInt = 65_536
    pad_to_multiple_of: PositiveInt = 1
    oversize: Literal["cut", "mask", "drop", "fail"] = "mask"
    normalise: str = "token"
    extras: tuple[str, ...] = ()
    """per-token columns of the environments' scores that the batch shall carry"""
    format: Literal["native", "prime-rl", "prime-rl-2026-05"] = "native"
    output_dir: Path | None = None
    """prime-rl's: steps of its formats appear under `rollouts/step_N` there; default: the run directory"""

    def packing_rules(self) -> PackingRules:
        return PackingRules(
            data_ranks=self.data_ranks,
            seq_len=self.seq_len,
            pad_to_multiple_of=self.pad_to_multiple_of,
            oversize=self.oversize,
        )

    @model_validator(mode="after")
    def _sound(self) -> "BatchSettings":
        self.packing_rules()
        Normalise.parse(self.normalise)
        return self


class Trainer(Section):
    max_steps_ahead: PositiveInt | Literal["unlimited"] = 1
    """sealed steps beyond the one that the trainer works on; "unlimited" when there is no trainer to wait for"""
    release_on: Literal["checkpointed", "acked"] = "checkpointed"
    """when a step's blobs may go"""
    keep_steps: Annotated[int, Field(ge=0)] = 2
    """steps whose token columns stay for looking back after their routed experts have gone"""


class Recovery(Section):
    lease_s: PositiveFloat = 10.0
    """a worker whose lease stands still for this long is taken for dead"""
    max_failures: PositiveInt = 3
    max_losses: PositiveInt = 20
    stage_timeout_s: PositiveFloat = 600.0
    """filtering, advantage and encoding jobs"""
    redis_patience_s: PositiveFloat = 15.0
    """how long a run that starts waits for Redis to answer: containers start in any order"""
    max_formations: PositiveInt = 3
    """a step that cannot be encoded is formed again at most this often, then the run stops"""
    drain_s: PositiveFloat = 60.0
    """how long a stopping process waits for what is running"""


class Lag(Section):
    interval_s: Annotated[float, Field(gt=0, le=0.1)] = 0.05
    p90_s: PositiveFloat = 0.05
    p99_s: PositiveFloat = 0.25
    max_s: PositiveFloat = 1.0
    trace_s: PositiveFloat | None = None
    """name the code that blocks a loop for longer than this, in the log and in `penstock status`"""

    def watch(self, process: str, publish: Publish | None = None) -> LoopLag:
        limits = LagLimits(p90_s=self.p90_s, p99_s=self.p99_s, max_s=self.max_s)
        trace = LagTrace(self.trace_s) if self.trace_s else None
        return LoopLag(process=process, interval_s=self.interval_s, limits=limits, publish=publish, trace=trace)


class Http(Section):
    """Where the orchestrator shows itself: `/metrics` for Prometheus, `/status`, `/health`. Anybody who can reach it
    may read it; nobody can change anything."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] | Literal["off"] = 0
    """0 is any free one: the log and `penstock status` say which"""


class Noop(Section):
    """Bodies that do nothing: they measure the pipe and stand in for the stages in tests."""

    rollout_s: Annotated[float, Field(ge=0)] = 0.0
    stage_s: Annotated[float, Field(ge=0)] = 0.0
    failure_rate: Share = 0.0
    """share of attempts, of any job, that fail with an infrastructure failure"""
    policy_error_rate: Share = 0.0
    drop_rate: Share = 0.0
    engine_down_while: Path | None = None
    """rollouts find the engine unreachable while this file exists"""
    wedge_while: Path | None = None
    """a rollout blocks its whole event loop while this file exists"""


class Testing(Section):
    crash_at: str | None = None
    """`POINT` or `POINT:N`: the orchestrator kills itself when it passes POINT for the Nth time"""


class RunConfig(Section):
    run_dir: Path = Path("runs/default")
    redis_url: str = DEFAULT_REDIS_URL
    """with its password, if it has one, in PENSTOCK_REDIS_URL rather than in a file"""
    store: str | None = None
    """where blobs and plans live, `file:///...`; default: `store` under the run directory"""
    max_store_gb: PositiveFloat | None = None
    """no rollout is begun while blobs that wait for the trainer hold more than this (1e9 bytes)"""
    ledger_dir: Path | None = None
    """a local disk for the ledger; default: the run directory"""
    steps: PositiveInt = 10
    vocab_size: PositiveInt = 151_936
    """of the model: tells an improbable token from gibberish"""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    environments: dict[EnvironmentName, EnvironmentSettings] = Field(
        default={"noop": EnvironmentSettings(use="noop")}, min_length=1
    )
    """what is played, by the name that jobs say; default: one that does nothing"""
    engine: Engine = Engine()
    policy: Policy = Policy()
    sessions: Sessions = Sessions()
    rollouts: Rollouts = Rollouts()
    batch: BatchSettings = BatchSettings()
    trainer: Trainer = Trainer()
    filters: FilterSettings = FilterSettings()
    advantages: AdvantageSettings = AdvantageSettings()
    recovery: Recovery = Recovery()
    lag: Lag = Lag()
    http: Http = Http()
    noop: Noop = Noop()
    testing: Testing = Testing()

    @field_validator("redis_url")
    @classmethod
    def _right_address(cls, redis_url: str) -> str:
        check(redis_url)
        return redis_url

    @field_validator("store")
    @classmethod
    def _shared_directory(cls, store: str | None) -> str | None:
        if store is not None and not store.startswith("file:///"):
            raise ValueError("must be a shared directory: file:///absolute/path")
        return store

    @property
    def store_dir(self) -> Path:
        return Path(self.store.removeprefix("file://")) if self.store else self.run_dir.resolve() / "store"

    @property
    def session_mode(self) -> Literal["linear", "open"]:
        return self.sessions.mode or ("linear" if self.policy.renderer else "open")

    @property
    def ledger_path(self) -> Path:
        return (self.ledger_dir or self.run_dir).resolve() / "ledger.sqlite"


def load(
    path: Path | None,
    *,
    flags: Mapping[str, Any] | None = None,
    section: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> RunConfig:
    """Read `path` (default: the file named by PENSTOCK_CONFIG, if set), then the environment, then `flags`.

    `flags` maps settings (`engine.urls`) to values; None is "not given". A flag is named like its setting
    (`--engine-urls`), without the name of the command's own `section`.
    """
    if path is None and CONFIG_VARIABLE in environ:
        path = Path(environ[CONFIG_VARIABLE])
    text = _read(path) if path else ""
    try:
        values: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    origins: Origins = {}
    for name, keys, value in _from_environment(environ):
        _set(values, keys, value)
        origins[keys] = f"environment, {name}"
    for key, value in (flags or {}).items():
        if value is not None:
            keys = tuple(key.split("."))
            _set(values, keys, value)
            named = keys[1:] if keys[0] == section else keys
            origins[keys] = "--" + "-".join(named).replace("_", "-")
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe(error, RunConfig, path, text, origins)) from error


def redis_url(environ: Mapping[str, str] = os.environ) -> str | None:
    """The one that the environment names: for whoever has no configuration, only a run directory."""
    url = environ.get(REDIS_VARIABLE)
    try:
        check(url or DEFAULT_REDIS_URL)
    except ValueError as error:
        raise ConfigError(f"environment, {REDIS_VARIABLE}: {error}") from None
    return url


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the configuration {path}: it is no text ({error.reason})") from error


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, Keys, str]]:
    """`PENSTOCK_RECOVERY__LEASE_S=5` sets `lease_s` in `[recovery]`."""
    for name, value in environ.items():
        if name.startswith(PREFIX) and name != CONFIG_VARIABLE:
            keys = tuple(name.removeprefix(PREFIX).lower().split("__"))
            if not is_setting(RunConfig, keys):
                raise ConfigError(unknown_variable(name, RunConfig, PREFIX, [CONFIG_VARIABLE]))
            yield name, keys, value


def _set(values: dict[str, Any], keys: Keys, value: Any) -> None:
    table: Any = values
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            return  # the file has a value where a table belongs: that is what the user will be told
    table[keys[-1]] = value

"""`RunConfig`: the settings of a run and its workers. Each setting is documented by the string below it."""

from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from headpond.advantages import AdvantageSettings
from headpond.batches.manifest import OWN_COLUMNS
from headpond.batches.plan import Format, Normalise, Oversize, PackingRules, lost_by_format
from headpond.config.engine import Engine, EnvironmentName, EnvironmentSettings, EvaluationSettings, Policy
from headpond.config.problems import Source
from headpond.config.redis_address import canonical
from headpond.config.sessions import Sessions
from headpond.declarations.sections import COMMAS, FIXED, OF_HOST, Declared, Port, Reader, Section, read_by
from headpond.errors import ConfigError
from headpond.event_loop.loop_lag import LagTrace, LoopLag, Publish
from headpond.fields import DTYPES, FieldSource, FieldType, Per, TrainerField
from headpond.filters import FilterSettings
from headpond.store import open_store

MOST_FIELDS = 32
FieldName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,39}$")]


class FieldSettings(Section):
    """A field for the trainer, from scores or turns to the micro-batch. See trainers.md, "A field of your own"."""

    declared = read_by(Reader.ORCHESTRATOR, Reader.ROLLOUTS, Reader.SESSIONS, Reader.TRAINER)

    source: FieldSource = "score"
    """Where its values come from: `Score.columns`, or the turns (`Completion.fields`, or the engine's response)."""
    per: Per = "token"
    """Whether every token has a value, or every sample."""
    dtype: FieldType = "f32"
    """Type of its values."""
    default: float | Literal["required"] = 0.0
    """The value where none is given: context of a turn, padding, rollouts without it. `"required"`: a scored rollout
    without it fails; padding is 0."""

    def named(self, name: str) -> TrainerField:
        default = None if self.default == "required" else self.default
        return TrainerField(name=name, source=self.source, per=self.per, dtype=self.dtype, default=default)

    @model_validator(mode="after")
    def _check_default(self) -> "FieldSettings":
        dtype, default = DTYPES[self.dtype], 0.0 if self.default == "required" else self.default
        limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
        if not limits.min <= default <= limits.max or (dtype.kind != "f" and not default.is_integer()):
            raise ValueError(f"default = {default:g} is not a value of {self.dtype}")
        return self


DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
WORKERS = (Reader.ROLLOUTS, Reader.COMPUTE)
EVERY_PROCESS = read_by(Reader.ORCHESTRATOR, *WORKERS, Reader.SESSIONS)
FOR_TRAINER = read_by(Reader.ORCHESTRATOR, Reader.TRAINER)


class Rollouts(Section):
    """How many rollouts are played, in which groups, and for how long."""

    group_size: Annotated[int, Field(ge=1, le=64), FIXED, read_by(Reader.ORCHESTRATOR, Reader.COMPUTE)] = 8
    """Rollouts of one example that share a baseline. At most 64: a group's verdicts travel in one small reply."""
    min_group_size: PositiveInt | None = None
    """Groups with fewer finished rollouts are dropped. Default: max(2, half the group)."""
    max_in_flight: PositiveInt = 1024
    """Most rollouts planned and not yet generated. Bounds the queue, the ledger's memory and the engine's backlog."""
    adapt_in_flight: bool = True
    """Whether fewer than `max_in_flight` rollouts are in flight while the engine's own queue grows, its KV cache is
    full or it preempts requests. Needs an engine that says so on `/metrics` (SGLang: `--enable-metrics`)."""
    timeout_s: PositiveFloat = 3600.0
    """Seconds that one attempt at a rollout may take."""
    group_timeout_s: PositiveFloat = 7200.0
    """Seconds of running time after which a group continues without its unfinished rollouts. Time in which none of its
    rollouts runs does not count."""
    partial_groups: Literal["train", "wait", "drop"] = "train"
    """What happens to a group of which some rollouts died or timed out: train on the rest, wait for all, or drop it."""
    oversample: Annotated[float, Field(ge=1)] = 1.0
    """Groups started for every group that the next steps need. Raise it when many groups are dropped."""
    graders: Annotated[PositiveInt | None, read_by(Reader.ROLLOUTS), OF_HOST] = None
    """Processes of one worker that score completions (`graded`). Default: one per core."""
    agent_user: Annotated[str | None, read_by(Reader.ROLLOUTS), OF_HOST] = None
    """User that agents' programs (`run_program`) run as, if the worker runs as root. Default: the worker's own."""

    @property
    def smallest_group(self) -> int:
        return self.min_group_size or min(self.group_size, max(2, -(-self.group_size // 2)))

    @model_validator(mode="after")
    def _check_sizes(self) -> "Rollouts":
        if self.max_in_flight < self.group_size:
            raise ValueError(f"max_in_flight ({self.max_in_flight}) must hold one group ({self.group_size})")
        if self.smallest_group > self.group_size:
            raise ValueError(f"min_group_size ({self.smallest_group}) is larger than group_size ({self.group_size})")
        return self


class BatchSettings(Section):
    """What a step's batch contains, and how it is packed and written."""

    unit: Annotated[Literal["groups", "rollouts", "tokens"], FIXED] = "groups"
    """Unit of `size`."""
    size: Annotated[PositiveInt, FIXED] = 16
    """Groups, rollouts or tokens of one step."""
    order: Literal["planned-window", "completion"] = "planned-window"
    """Which groups a step takes: the first finished ones of a window of planned groups, or the first finished ones."""
    window: Annotated[float, Field(ge=1)] = 2.0
    """Length of that window in batches. A wider one waits less for slow groups and prefers short rollouts more."""
    max_empty_batches: PositiveInt = 10
    """The run stops after this many batches' worth of groups in a row were dropped."""
    data_ranks: Annotated[PositiveInt, FIXED, FOR_TRAINER] = 1
    """Data-parallel ranks of the trainer; each reads a file of its own."""
    seq_len: PositiveInt = 65_536
    """Most tokens of one micro-batch, padding included."""
    pad_to_multiple_of: PositiveInt = 1
    """Micro-batches are padded to a multiple of this many tokens."""
    oversize: Oversize = "mask"
    """What happens to a sample longer than `seq_len`: cut it; cut it and mask its loss; drop it; fail the step."""
    normalise: str = "token"
    """What the loss is averaged over: `token`, `sample`, `rollout`, or `constant:L` (a rollout's sum over L)."""
    fields: Annotated[dict[FieldName, FieldSettings], Field(max_length=MOST_FIELDS)] = Field(default={})
    """The fields that the batch carries beside its own columns, by name."""
    rollouts_jsonl: Annotated[bool, read_by(Reader.COMPUTE)] = False
    """Write a line of JSON for each rollout, with its conversation, into `rollouts.*.jsonl` of the step. Every byte of
    the conversations is written when the step is encoded; `trainer.keep_jsonl_steps` bounds how many are kept."""
    format: Annotated[Format, FOR_TRAINER] = "native"  # after `fields` and `normalise`, which its validator reads
    """File format of the batches: `native`, or one of prime-rl's: `prime-rl` (since August 2026), `prime-rl-2026-08`.
    Those cannot hold every field, and only `normalise = "token"`."""
    output_dir: Annotated[Path | None, FOR_TRAINER, OF_HOST] = None
    """Output directory of prime-rl's run, where its trainer reads the batches and writes its broadcasts. Default: the
    run directory."""

    def packing_rules(self) -> PackingRules:
        return PackingRules(
            data_ranks=self.data_ranks,
            seq_len=self.seq_len,
            pad_to_multiple_of=self.pad_to_multiple_of,
            oversize=self.oversize,
        )

    @cached_property
    def declared_fields(self) -> tuple[TrainerField, ...]:
        """Return the fields in the order of their names."""
        return tuple(settings.named(name) for name, settings in sorted(self.fields.items()))

    def fields_of(self, source: FieldSource) -> tuple[TrainerField, ...]:
        return tuple(field for field in self.declared_fields if field.source == source)

    @field_validator("normalise")
    @classmethod
    def _check_normalise(cls, normalise: str) -> str:
        try:
            Normalise.parse(normalise)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return normalise

    @model_validator(mode="after")
    def _check_packing(self) -> "BatchSettings":
        try:
            self.packing_rules()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    @field_validator("fields")
    @classmethod
    def _check_names(cls, fields: dict[str, FieldSettings]) -> dict[str, FieldSettings]:
        if taken := sorted(OWN_COLUMNS & fields.keys()):
            raise ValueError(f"{', '.join(taken)}: the batch has a column of that name; choose another")
        return fields

    @field_validator("format")
    @classmethod
    def _check_format(cls, name: Format, info: ValidationInfo) -> Format:
        """Nothing that is declared may be missing from the files."""
        fields: dict[str, FieldSettings] = info.data.get("fields", {})
        declared = tuple(settings.named(name) for name, settings in fields.items())
        if problem := lost_by_format(name, info.data.get("normalise", "token"), declared):
            raise ValueError(problem)
        return name


class Trainer(Section):
    """How far the run may be ahead of the trainer, and when its files are deleted."""

    command: Annotated[str | None, OF_HOST, read_by(Reader.UP)] = None
    """Command with which `headpond up` starts the trainer on this machine, e.g. `python trainer.py {run_dir}`. The
    directory of the run replaces `{run_dir}`. Default: the trainer is started separately."""
    max_steps_ahead: NonNegativeInt | Literal["unlimited"] = 1
    """Most sealed steps that wait for the trainer, beside the one it works on. 0 is strictly on-policy: rollouts of a
    step begin when every replica has the version that the step before was trained into. `"unlimited"`: do not wait for
    a trainer."""
    release_on: Literal["checkpointed", "acked"] = "checkpointed"
    """When a step's blobs are deleted: once the trainer has checkpointed the step, or once it has acknowledged it."""
    keep_steps: Annotated[int, Field(ge=0)] = 2
    """Released steps whose token columns are kept for inspection; their routed experts are deleted."""
    keep_jsonl_steps: Annotated[int, Field(ge=0)] = 100
    """Released steps whose `rollouts.*.jsonl` is kept, if `batch.rollouts_jsonl` writes it."""
    keep_manifests: PositiveInt | Literal["all"] = "all"
    """Released steps whose manifest is kept, about 0.4 kB a rollout; at least as many as keep other files. Audits and a
    rebuilt ledger know only steps whose manifest is kept."""
    last_broadcast_s: Annotated[float, Field(ge=0)] = 1800.0
    """Seconds that a complete run with `batch.format = "prime-rl"` waits for the next broadcast of its trainer: that
    trainer waits until each of its broadcasts is accepted, also those after the last step."""
    keep_events_steps: Annotated[int, Field(ge=0)] = 50
    """Delivered steps whose histories the ledger keeps: events, and the jobs and whole results of the rollouts that
    were closed meanwhile. At most 100,000 events and 50,000 groups. Of older rollouts it keeps about 100 bytes: state,
    reason, step, reward, advantage, lengths, versions, times and execution."""


class Recovery(Section):
    """How losses and failures are detected and retried."""

    lease_s: Annotated[PositiveFloat, read_by(Reader.ORCHESTRATOR, *WORKERS)] = 10.0
    """Seconds without a renewed lease after which an execution is lost and its job is submitted again."""
    max_failures: PositiveInt = 3
    """Failures after which a job is dead."""
    max_losses: PositiveInt = 20
    """Lost executions after which a job is dead."""
    stage_timeout_s: PositiveFloat = 600.0
    """Seconds that a job other than a rollout may take."""
    redis_patience_s: PositiveFloat = 15.0
    """Seconds that a starting run waits for Redis: containers start in any order."""
    max_formations: PositiveInt = 3
    """Times that a step which cannot be encoded is formed, before the run stops."""
    drain_s: Annotated[PositiveFloat, read_by(Reader.ORCHESTRATOR, Reader.ROLLOUTS)] = 60.0
    """Seconds that a stopping process waits for running jobs."""
    stall_s: PositiveFloat | None = None
    """Seconds without progress after which the run ends with an error that says why, so that a scheduler frees its
    machines: no group was admitted, no step delivered or acknowledged. Must exceed the longest rollout, evaluation and
    training step. Default: the run waits."""
    max_example_deaths: PositiveInt = 4
    """Rollouts of one example that may die in a row while those of others do not; then the example is not played again
    until `headpond dead --retry`."""


class Lag(Section):
    """How the lag of every event loop is measured."""

    declared = Declared(read_by=(Reader.ORCHESTRATOR, Reader.ROLLOUTS, Reader.SESSIONS), of_host=True)

    interval_s: Annotated[float, Field(gt=0, le=0.1)] = 0.05
    """Seconds between two measurements."""
    trace_s: PositiveFloat | None = None
    """Code that blocks a loop for longer than this many seconds is named in the log and in `headpond status`.
    Default: off."""

    def watch(self, process: str, publish: Publish | None = None) -> LoopLag:
        trace = LagTrace(self.trace_s) if self.trace_s else None
        return LoopLag(process=process, interval_s=self.interval_s, publish=publish, trace=trace)


class Http(Section):
    """The orchestrator's read-only HTTP endpoint: `/metrics` for Prometheus, `/status`, `/health`."""

    declared = OF_HOST

    host: str = "127.0.0.1"
    """Bind address. There is no authentication."""
    port: Port | Literal["off"] = 0
    """Port to listen on; 0 picks a free one, shown by the log and `headpond status`. `"off"`: no endpoint."""


class MetricsSettings(Section):
    """Where the lines of metrics.jsonl are also sent, by a process beside the orchestrator."""

    declared = OF_HOST

    sinks: Annotated[tuple[Literal["wandb", "tensorboard", "trackio"], ...], COMMAS] = ()
    """`wandb`, `tensorboard` (event files in the run directory) and `trackio`, each with its package installed where
    the orchestrator runs: `wandb`, `tensorboardX`, `trackio`."""
    project: str = "headpond"
    """Project of W&B and trackio."""
    name: str | None = None
    """Name of the run there. Default: that of the run directory."""


class RunConfig(Section):
    declared = read_by(Reader.ORCHESTRATOR)

    run_dir: Annotated[Path, OF_HOST] = Path("runs/default")
    """Directory of the run; an existing run is resumed."""
    steps: PositiveInt = 10
    """Steps after which the run ends."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), FIXED] = 0
    """Seed of the run, from which every rollout derives its own."""
    redis_url: Annotated[str, EVERY_PROCESS, OF_HOST] = DEFAULT_REDIS_URL
    """Address of Redis: `redis://`, `rediss://` (TLS, verified) or `unix://`. Set HEADPOND_REDIS_URL rather than
    writing a password to a file."""
    store: Annotated[str | None, EVERY_PROCESS, OF_HOST] = None
    """URL of the store of blobs, job inputs and batches: a shared directory, `file:///...`, or `module:Class://address`
    for a store of your own. Default: `store` in the run directory. At a resume, the run's files must be there."""
    max_store_gb: PositiveFloat | None = None
    """No rollout is started while blobs that wait for the trainer take more than this many GB (1e9 bytes)."""
    ledger_dir: Annotated[Path | None, OF_HOST] = None
    """Directory of the ledger, on a local disk. Default: the run directory."""
    vocab_size: Annotated[PositiveInt, read_by(Reader.COMPUTE)] = 151_936
    """Vocabulary size of the model, which the gibberish filter compares probabilities with."""
    environments: dict[EnvironmentName, EnvironmentSettings] = Field(default={})
    """The environments to play, by name. A run needs at least one; a worker without any loads the built-in ones."""
    evaluation: dict[EnvironmentName, EvaluationSettings] = Field(default={})
    """The evaluations, by name."""
    engine: Engine = Engine()
    policy: Policy = Policy()
    sessions: Sessions = Sessions()
    rollouts: Rollouts = Rollouts()
    filters: FilterSettings = FilterSettings()
    advantages: AdvantageSettings = AdvantageSettings()
    batch: BatchSettings = BatchSettings()
    trainer: Trainer = Trainer()
    recovery: Recovery = Recovery()
    lag: Lag = Lag()
    http: Http = Http()
    metrics: MetricsSettings = MetricsSettings()

    _source: Source = PrivateAttr(default=Source())

    def read_from(self, source: Source) -> None:
        self._source = source

    def place_of(self, *keys: str) -> str:
        """The file and line, variable or flag that sets `keys`, for messages about its value."""
        return self._source.place_of(keys)

    @field_validator("evaluation")
    @classmethod
    def _check_evaluation(
        cls, evaluation: dict[str, EvaluationSettings], info: ValidationInfo
    ) -> dict[str, EvaluationSettings]:
        if taken := sorted(evaluation.keys() & info.data.get("environments", {}).keys()):
            raise ValueError(f"{', '.join(taken)}: an environment has that name; choose another for the evaluation")
        return evaluation

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, redis_url: str) -> str:
        return canonical(redis_url)

    @field_validator("store")
    @classmethod
    def _check_store(cls, store: str | None) -> str | None:
        if store is not None:
            try:
                opened = open_store(store)
            except ConfigError as error:
                raise ValueError(str(error).removeprefix("store ")) from error
            if not opened.shared:
                raise ValueError(f"{store} is seen by one process only: use a shared directory, file:///absolute/path")
        return store

    @model_validator(mode="after")
    def _check_prime_rl(self) -> "RunConfig":
        if self.batch.format != "native" and self.engine.sampling_masks:
            raise ValueError(
                f'engine.sampling_masks: format = "{self.batch.format}" cannot hold them; use "native", or remove it'
            )
        if self.batch.format != "native" and "all" in self.environments:
            raise ValueError(
                f'environments.all: format = "{self.batch.format}" cannot hold it, because prime-rl keeps the metrics '
                "of all environments under that name; rename the environment"
            )
        return self

    @property
    def prime_rl_dir(self) -> Path:
        return self.batch.output_dir or self.run_dir

    @property
    def store_url(self) -> str:
        """Return the argument of `open_store`."""
        return self.store or (self.run_dir.resolve() / "store").as_uri()

    @property
    def ledger_path(self) -> Path:
        return (self.ledger_dir or self.run_dir).resolve() / "ledger.sqlite"

    @property
    def session_mode(self) -> Literal["linear", "open"]:
        return self.sessions.mode or ("linear" if self.policy.renderer else "open")

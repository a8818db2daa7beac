"""The sections of rollouts: `[environments.NAME]`, `[evaluation.NAME]`, `[engine]`, `[policy]`."""

import difflib
from enum import StrEnum
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    field_validator,
    model_validator,
)

from headpond.data import SAMPLERS, UNIFORM, Order
from headpond.declarations.named_code import is_custom, unknown
from headpond.declarations.sections import OF_HOST, CommaSeparated, Declared, Fraction, Reader, Section, read_by
from headpond.records.rollout import SAMPLES_LIMIT
from headpond.turn import CheckRoutes, RouteFormat

DIALECTS = {
    "vllm": "headpond.engines.dialects.vllm:Vllm",
    "sglang": "headpond.engines.dialects.sglang:Sglang",
    "generate": "headpond.engines.dialects.generate:Generate",
}
"""The built-in values of `engine.dialect` and their classes."""
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,40}$")]
BYTES_CHATML = "bytes-chatml"
OF_DATA = Declared(read_by=(Reader.ORCHESTRATOR,), fixed=False)
OF_SAMPLER = Declared(read_by=(Reader.ORCHESTRATOR, Reader.COMPUTE), fixed=False)
# Set by Headpond in every request; `n` because exactly one completion can be recorded.
RESERVED = frozenset(
    {"model", "messages", "tools", "stream", "n", "logprobs", "token_ids", "input_ids", "sampling_params", "seed"}
)


OF_ENGINE = read_by(Reader.ORCHESTRATOR, Reader.ROLLOUTS, Reader.SESSIONS)
BY_ORCHESTRATOR = read_by(Reader.ORCHESTRATOR)


class EnvironmentCode(Section):
    """The code of an environment."""

    use: str
    """A built-in environment (`arithmetic`, `guess`, `distinct`, `program`), `verifiers`, or `module:Class`."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of the class."""


class EnvironmentSettings(EnvironmentCode):
    """One environment, under the name that jobs and metrics use."""

    declared = Declared(read_by=(Reader.ORCHESTRATOR, Reader.ROLLOUTS), fixed=True)

    weight: Annotated[PositiveFloat, read_by(Reader.ORCHESTRATOR)] = 1.0
    """Share of the training batch, relative to the other environments."""
    order: Annotated[Order, OF_DATA] = "shuffled"
    """Order of the examples: `shuffled` anew in every epoch, by `seed`, or `in_order`. Another value holds from the
    next epoch on."""
    epochs: Annotated[PositiveInt | None, OF_DATA] = None
    """Times that every example is played, in groups that are dropped too; with a sampler, that many times the number
    of examples. The run ends when every environment has reached its limit. Default: no limit."""
    sampler: Annotated[str, OF_SAMPLER] = UNIFORM
    """What chooses the examples: `uniform` (each once in an epoch, by `order`), `weighted`, `solve_rate`, or
    `module:Class`, a class of your own that compute workers import."""
    sampler_options: Annotated[dict[str, Any], OF_SAMPLER] = Field(default={})
    """Keyword arguments of the sampler's class: `weights` (a list or a file) for `weighted`; `skip_solved`,
    `skip_unsolved`, `solved`, `unsolved` for `solve_rate`."""

    @field_validator("sampler")
    @classmethod
    def _check_sampler(cls, name: str) -> str:
        if not is_custom(name) and name not in (UNIFORM, *SAMPLERS):
            raise ValueError(unknown(name, (UNIFORM, *SAMPLERS)))
        return name


class AbsentRoutes(StrEnum):
    """What follows when routed experts were requested and a response has none."""

    ERROR = "error"
    MASK = "mask"
    DROP = "drop"


class Engine(Section):
    """The inference server."""

    declared = read_by(Reader.ROLLOUTS, Reader.SESSIONS)

    urls: Annotated[CommaSeparated, OF_HOST, OF_ENGINE] = ("http://127.0.0.1:8000",)
    """Base URLs of the replicas, without `/v1`. Separated by commas in an environment variable or a flag."""
    model: str = "policy"
    """Model name sent with every request."""
    dialect: Annotated[str, OF_ENGINE] = "vllm"
    """API of the engine: `vllm` or `sglang` (chat), `generate` (token ids in and out, `/inference/v1/generate`), or
    `module:Class`, a class of your own that the orchestrator, rollout workers and session servers import."""
    api_key: Annotated[SecretStr | None, OF_HOST, OF_ENGINE] = None
    """Bearer token sent to the engine. Set HEADPOND_ENGINE__API_KEY rather than writing it to a file."""
    command: Annotated[str | None, OF_HOST, read_by(Reader.UP)] = None
    """Command with which `headpond up` starts the engine on this machine, e.g. `vllm serve MODEL --port {port}`. A free
    port replaces `{port}`, and the run uses it instead of `urls`. Default: the engine is started separately."""
    connections: Annotated[PositiveInt, OF_HOST] = 1024
    """Most open connections of one process; further requests wait."""
    received_bytes: Annotated[PositiveInt, OF_HOST] = 1 << 30
    """Most bytes of response bodies that one process receives at once; above it, reads wait."""
    connect_timeout_s: Annotated[PositiveFloat, OF_ENGINE] = 5.0
    """Seconds to wait for a connection."""
    versions: Annotated[Literal["reported", "announced"], OF_ENGINE] = "reported"
    """Where the policy version of a turn comes from: what the engine says of itself, or, for an engine that says
    nothing, what the trainer announced. Announced versions are never exact, and a replica that restarted with its first
    weights is not noticed."""
    weight_update: Annotated[Literal["trainer", "headpond"], OF_ENGINE] = "trainer"
    """Who loads new weights into the engine: the trainer, before it calls `publish_policy(version)`, or the
    orchestrator, from the directory of `publish_policy(version, weights=DIR)`."""
    weight_update_timeout_s: Annotated[PositiveFloat, read_by(Reader.ORCHESTRATOR)] = 300.0
    """Seconds within which a replica must have a published version. After that it serves nothing that is trained on,
    until it has it; with `weight_update = "headpond"` also the time limit of one update."""
    check: Annotated[bool, read_by(Reader.ORCHESTRATOR), OF_HOST] = True
    """Whether every start of a run plays a few short conversations first, and refuses an engine that would fail or
    spoil every rollout. An engine that is away is waited for: set it to false if only the workers' hosts reach it."""
    silence_s: PositiveFloat = 600.0
    """Seconds without a byte after which a request has failed. Must exceed the longest generation."""
    response_s: PositiveFloat = 7200.0
    """Seconds for a whole response. An engine that sends a byte now and then has failed after it, too."""
    retries: NonNegativeInt = 4
    """Retries of one request after an invalid or interrupted response."""
    unreachable_s: PositiveFloat = 30.0
    """Seconds that a request tries to connect to any replica before its rollout is released and submitted later."""
    retry_first_s: PositiveFloat = 0.5
    """Seconds before the first retry; each further one waits twice as long."""
    retry_most_s: PositiveFloat = 10.0
    """Most seconds before a retry."""
    logprobs_mode: Annotated[Literal["processed", "raw"], OF_ENGINE] = "processed"
    """Kind of logprobs that the engine returns (vLLM: `--logprobs-mode processed_logprobs`); recorded in the batch."""
    routed_experts: bool = False
    """Whether to request the experts that every token was routed to."""
    hidden_layers: PositiveInt | None = None
    """Hidden layers of the model, dense ones included (`num_hidden_layers`). Needed with `experts_per_token` for
    SGLang, whose routed experts carry no shape."""
    experts_per_token: PositiveInt | None = None
    """Experts that a token is routed to in one layer (`num_experts_per_tok`, top-k). Every response is checked
    against it."""
    moe_experts: PositiveInt | None = None
    """Experts of one layer. Up to 256, an expert is stored in one byte, else in two."""
    check_experts: CheckRoutes = CheckRoutes.SAMPLE
    """Which new rows of routed experts are checked for zeros, which an engine sends where it captured nothing:
    `sample`, `all` or `off`."""

    lora: Annotated[bool, OF_ENGINE] = False
    """With `weight_update = "headpond"`: what the trainer publishes are LoRA adapters. Each version is loaded under a
    name of its own, and requests name it as their model."""
    sampling_masks: bool = False
    """Whether to record, for each sampled token, the tokens that it was drawn from (top-k, top-p, min-p). vLLM sends
    them with `dialect = "generate"` and `--return-sampling-mask`, SGLang on request."""
    absent_routes: Annotated[AbsentRoutes, read_by(Reader.ROLLOUTS, Reader.SESSIONS, Reader.COMPUTE)] = (
        AbsentRoutes.ERROR
    )
    """With `routed_experts`, what follows from a response without them: `error` (the request is repeated, on another
    replica if there is one; then the rollout has failed), `mask` (the turn is kept out of the loss) or `drop` (the
    rollout is dropped)."""

    @property
    def route_format(self) -> RouteFormat:
        return RouteFormat(
            layers=self.hidden_layers,
            topk=self.experts_per_token,
            experts=self.moe_experts,
            check=self.check_experts,
        )

    @model_validator(mode="after")
    def _check_shape(self) -> "Engine":
        if self.dialect == "sglang" and self.routed_experts and None in (self.hidden_layers, self.experts_per_token):
            raise ValueError(
                "SGLang's routed experts carry no shape: set hidden_layers (num_hidden_layers of the model's "
                "config.json, dense layers included) and experts_per_token (num_experts_per_tok)"
            )
        if self.dialect == "vllm" and self.sampling_masks:
            raise ValueError(
                'vLLM sends sampling masks with dialect = "generate" only: set it, or remove sampling_masks'
            )
        return self

    @field_validator("dialect")
    @classmethod
    def _check_dialect(cls, dialect: str) -> str:
        module, _, name = dialect.partition(":")
        if dialect not in DIALECTS and not (name.isidentifier() and all(map(str.isidentifier, module.split(".")))):
            near = difflib.get_close_matches(dialect, DIALECTS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{dialect!r} is not known; {hint}built in: {', '.join(DIALECTS)}; or module:Class")
        return dialect

    @model_validator(mode="after")
    def _check_versions(self) -> "Engine":
        if self.lora and self.weight_update != "headpond":
            raise ValueError('lora = true needs weight_update = "headpond": requests name the adapters that it loads')
        if self.weight_update == "headpond" and self.versions == "announced":
            raise ValueError('weight_update = "headpond" needs versions = "reported": updates are checked by them')
        return self

    @field_validator("urls")
    @classmethod
    def _check_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        parts = [urlsplit(url) for url in urls]
        if not urls or any(each.scheme not in ("http", "https") or not each.hostname for each in parts):
            raise ValueError("give at least one URL that looks like http://host:port")
        if any("@" in each.netloc for each in parts):
            raise ValueError(
                "a URL with a user or a password is shown by logs and status: set engine.api_key, or let the proxy in "
                "front of the engine add what it asks for"
            )
        return tuple(url.rstrip("/").removesuffix("/v1") for url in urls)


class Sampling(Section):
    """Sampling parameters of every request. What is not set is left to the engine."""

    declared = read_by(Reader.ROLLOUTS)

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature."""
    max_tokens: PositiveInt | None = None
    """Most tokens of one completion. Default: the engine's limit."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Probability mass that tokens are sampled from."""
    top_k: int | None = None
    """Number of most likely tokens that are sampled from."""
    min_p: Fraction | None = None
    """Least probability of a token, relative to the most likely one."""
    presence_penalty: float | None = None
    """Penalty of tokens that have occurred."""
    frequency_penalty: float | None = None
    """Penalty of tokens by how often they have occurred."""
    repetition_penalty: PositiveFloat | None = None
    """Factor that makes tokens less likely that have occurred; 1 is neutral."""
    stop: tuple[str, ...] | None = None
    """Strings that end a completion."""
    more: dict[str, Any] = Field(default={})
    """Further fields of the request, as the engine spells them, e.g. `chat_template_kwargs`."""

    @field_validator("more")
    @classmethod
    def _check_names(cls, more: dict[str, Any]) -> dict[str, Any]:
        if refused := sorted(RESERVED & more.keys()):
            raise ValueError(f"{', '.join(refused)}: set by Headpond itself")
        return more


class RendererSettings(Section):
    """How messages become tokens outside the engine. A string is short for a table: a directory, or `bytes-chatml`."""

    backend: Literal["bytes-chatml", "directory", "renderers"] = "directory"
    """`bytes-chatml`: ChatML over bytes. `directory`: a Hugging Face tokenizer and its chat template. `renderers`: the
    package of that name, which handles model families beyond their templates."""
    model: Annotated[str | None, OF_HOST] = None
    """Directory of the tokenizer; the adapters of one base model share it. Default: `engine.model`."""
    options: dict[str, Any] = Field(default={})
    """Options of the package's renderer, as it spells them (`name`, `thinking_retention`)."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Values for the chat template, e.g. `enable_thinking`."""


class Policy(Section):
    """Limits of a rollout's conversation with the engine."""

    declared = read_by(Reader.ROLLOUTS, Reader.SESSIONS)

    max_seq_len: PositiveInt = 32768
    """Most tokens of prompt and completion together; longer ones are cut, and the rollout is `truncated`."""
    max_turns: PositiveInt = 512
    """Most turns of a rollout. Coding agents take hundreds."""
    max_samples: Annotated[int, Field(ge=1, le=SAMPLES_LIMIT)] = SAMPLES_LIMIT
    """Most samples of a rollout. A prompt that does not extend the last sequence starts another sample; a rollout with
    more of them has failed."""
    policy_error_reward: Annotated[float, read_by(Reader.ROLLOUTS)] = 0.0
    """Reward of a rollout that exceeded its time, turns or context, where the environment gives none."""
    seeded: Annotated[bool, read_by(Reader.ROLLOUTS)] = False
    """Whether every request carries a seed, derived from rollout and turn. Costs throughput on vLLM."""
    renderer: RendererSettings | None = None
    """Renders prompts to tokens: `"bytes-chatml"`, the directory of a tokenizer, or a table. Required with
    `engine.dialect = "generate"`, optional with `"sglang"`. Default: the engine renders."""
    sampling: Sampling = Sampling()

    @field_validator("renderer", mode="before")
    @classmethod
    def _expand(cls, renderer: object) -> object:
        if renderer == BYTES_CHATML:
            return {"backend": BYTES_CHATML, "model": BYTES_CHATML}
        return {"model": renderer} if isinstance(renderer, str) else renderer


class EvaluationSettings(EnvironmentCode):
    """Examples that are played every few policy versions and never trained on. The name differs from those of
    `[environments.NAME]`."""

    declared = read_by(Reader.ORCHESTRATOR, Reader.ROLLOUTS)

    every: Annotated[PositiveInt, BY_ORCHESTRATOR] = 10
    """Policy versions from one evaluation to the next. One that takes longer delays the next."""
    at_start: Annotated[bool, BY_ORCHESTRATOR] = True
    """Whether the version that the run begins with is evaluated."""
    examples: Annotated[PositiveInt | Literal["all"], BY_ORCHESTRATOR] = 64
    """Examples that are played, the first ones of the environment: the same in every evaluation."""
    rollouts: Annotated[PositiveInt, BY_ORCHESTRATOR] = 1
    """Rollouts of each example."""
    share: Annotated[float, Field(gt=0, le=1), BY_ORCHESTRATOR] = 0.25
    """Most of its rollouts in flight at once, as a share of `rollouts.max_in_flight` and in addition to those, so that
    training goes on; at least those of one example."""
    hold_s: Annotated[NonNegativeFloat, BY_ORCHESTRATOR] = 600.0
    """Seconds that the end of the run waits for it, and the next update of the weights where Headpond makes it. Under
    a trainer's own updates, the versions that played it are reported."""
    sampling: Sampling | None = None
    """Sampling parameters of its requests, all of them. Default: those of `policy.sampling`."""

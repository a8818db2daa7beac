"""The sections of the configuration that say how rollouts are played: `[engine]`, `[policy]`, `[environments.*]`."""

from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveFloat, PositiveInt, SecretStr, field_validator

from penstock.config.sections import Section, Share
from penstock.messages import SAMPLES_LIMIT
from penstock.turn import CheckRoutes, RouteFormat

EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,40}$")]


class Engine(Section):
    """The inference server. With a key, give it as PENSTOCK_ENGINE__API_KEY rather than in a file."""

    urls: tuple[str, ...] = ("http://127.0.0.1:8000",)
    """one a replica, without `/v1`; as a variable: separated by commas"""
    model: str = "policy"
    dialect: Literal["vllm", "sglang", "generate"] = "vllm"
    """what is asked and where: vLLM's chat, SGLang's chat, or tokens in and out (`/inference/v1/generate`)"""
    api_key: SecretStr | None = None
    connections: PositiveInt = 1024
    """open at once from one process; rollouts beyond that wait for their turn"""
    received_bytes: PositiveInt = 1 << 30
    """bodies being received by one process; over it, reads wait"""
    connect_timeout_s: PositiveFloat = 5.0
    silence_s: PositiveFloat = 600.0
    """a request to which not a byte comes back for this long has failed: longer than the longest generation"""
    retries: NonNegativeInt = 4
    """of one request that the engine answered wrongly, or broke off"""
    unreachable_s: PositiveFloat = 30.0
    """how long a request looks for a replica that can be connected to, before the rollout is given back"""
    retry_first_s: PositiveFloat = 0.5
    retry_most_s: PositiveFloat = 10.0
    logprobs_mode: Literal["processed", "raw"] = "processed"
    """what the engine was started with (vLLM: `--logprobs-mode processed_logprobs`)"""
    routed_experts: bool = False
    """ask for the experts that every token was routed to"""
    hidden_layers: PositiveInt | None = None
    """Hidden layers of the model, dense ones included. Needed for SGLang, whose routed experts carry no shape."""
    moe_experts: PositiveInt | None = None
    """of a layer; up to 256 are kept in one byte"""
    check_routes: CheckRoutes = CheckRoutes.SAMPLE
    """which new rows are looked at for zeros, an engine's way of saying that it captured nothing"""

    @property
    def route_format(self) -> RouteFormat:
        return RouteFormat(layers=self.hidden_layers, experts=self.moe_experts, check=self.check_routes)

    @field_validator("urls", mode="before")
    @classmethod
    def _separated(cls, urls: object) -> object:
        return tuple(url.strip() for url in urls.split(",")) if isinstance(urls, str) else urls

    @field_validator("urls")
    @classmethod
    def _usable(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        if not urls or any(not url.startswith(("http://", "https://")) for url in urls):
            raise ValueError("give at least one URL that looks like http://host:port")
        return tuple(url.rstrip("/").removesuffix("/v1") for url in urls)


BYTES_CHATML = "bytes-chatml"

# Penstock's own; `n` because exactly one answer can be recorded.
RESERVED = frozenset(
    {"model", "messages", "tools", "stream", "n", "logprobs", "token_ids", "input_ids", "sampling_params", "seed"}
)


class Sampling(Section):
    temperature: Annotated[float, Field(ge=0)] = 1.0
    max_tokens: PositiveInt | None = None
    """of one turn; default: what the engine allows"""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: int | None = None
    min_p: Share | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: PositiveFloat | None = None
    stop: tuple[str, ...] | None = None
    more: dict[str, Any] = Field(default={})
    """other fields of the request, as the engine spells them (`chat_template_kwargs`)"""

    @field_validator("more")
    @classmethod
    def _not_ours(cls, more: dict[str, Any]) -> dict[str, Any]:
        if refused := sorted(RESERVED & more.keys()):
            raise ValueError(f"{', '.join(refused)}: set by Penstock itself")
        return more


class RendererSettings(Section):
    """Who turns messages into tokens, for engines that take tokens. A name or a directory alone is a table, too."""

    backend: Literal["bytes-chatml", "directory", "renderers"] = "directory"
    """bytes as tokens; a Hugging Face tokenizer's directory with its chat template; or the package `renderers`, which
    knows more of a model family than its template says"""
    model: str | None = None
    """whose tokenizer it is: pins one for all adapters of a base model; default: the model of each request"""
    options: dict[str, Any] = Field(default={})
    """of the package's renderer, as it spells them (`name`, `thinking_retention`)"""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """what the chat template is given beside the messages (`enable_thinking`)"""


class Policy(Section):
    """How a rollout may talk to the engine."""

    max_seq_len: PositiveInt = 32768
    """tokens of prompt and completion together; what exceeds it is cut, and the rollout is `truncated`"""
    max_turns: PositiveInt = 64
    max_samples: Annotated[int, Field(ge=1, le=SAMPLES_LIMIT)] = SAMPLES_LIMIT
    """a conversation whose prefix breaks starts another sample; a rollout with more of them has failed"""
    policy_error_reward: FiniteFloat = 0.0
    """of a rollout that the policy spoilt (time, turns, context), where the environment does not score it"""
    seeded: bool = False
    """every request carries a seed, by rollout and turn; costs throughput on vLLM"""
    renderer: RendererSettings | None = None
    """`"bytes-chatml"`, the directory of a tokenizer, or a table; needed where `engine.dialect` takes tokens"""
    sampling: Sampling = Sampling()

    @field_validator("renderer", mode="before")
    @classmethod
    def _in_a_word(cls, renderer: object) -> object:
        if renderer == BYTES_CHATML:
            return {"backend": BYTES_CHATML, "model": BYTES_CHATML}
        return {"model": renderer} if isinstance(renderer, str) else renderer


class EnvironmentSettings(Section):
    use: str
    """a built-in (arithmetic, guess, distinct), or `module:Class` of your own"""
    weight: PositiveFloat = 1.0
    """its share of the trained batch, relative to the others"""
    options: dict[str, Any] = Field(default={})
    """what the class is made with"""

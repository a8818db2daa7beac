"""What an engine is told when it starts."""

from dataclasses import dataclass, fields
from enum import StrEnum

from penstock.errors import ConfigError
from services.engine.draws import Distribution

AT_ONCE = Distribution.parse("constant:0")
A_FEW_LINES = Distribution.parse("lognormal:120:0.5")


class Dialect(StrEnum):
    """Who `/v1/chat/completions` sounds like."""

    VLLM = "vllm"
    SGLANG = "sglang"


class Form(StrEnum):
    """How routed experts are written: the four forms of `penstock.routed_experts`."""

    OBJECT = "object"
    NPY = "npy"
    BARE = "bare"
    LISTS = "lists"


@dataclass(frozen=True, kw_only=True)
class RouteShape:
    layers: int
    topk: int = 8
    experts: int = 128
    form: Form | None = None
    """None: stock vLLM's chat sends `npy`, SGLang's `bare`, `/inference/v1/generate` `object`"""

    def __post_init__(self) -> None:
        if self.layers < 1 or self.topk < 1 or not 2 <= self.experts <= 65536:
            raise ConfigError("routed experts need at least 1 layer, a top-k of 1 and 2 to 65536 experts")


@dataclass(frozen=True, kw_only=True)
class FailureRates:
    """Shares of the requests that go wrong in each way."""

    error: float = 0.0
    """answered with a 500"""
    malformed: float = 0.0
    """a 200 whose body an engine must not have sent"""
    hang: float = 0.0
    """never answered"""
    disconnect: float = 0.0
    """the connection breaks in the middle of the body"""

    def __post_init__(self) -> None:
        rates = (self.error, self.malformed, self.hang, self.disconnect)
        if not all(rate >= 0 for rate in rates) or sum(rates) > 1:
            raise ConfigError(f"failure rates must not be negative, nor more than 1 together; they are {rates}")

    @classmethod
    def parse(cls, text: str) -> "FailureRates":
        """`error=0.01,hang=0.002`"""
        pairs = [pair.partition("=") for pair in text.split(",") if pair]
        try:
            return cls(**{name: float(rate) for name, _, rate in pairs})
        except (TypeError, ValueError):
            names = ", ".join(field.name for field in fields(cls))
            raise ConfigError(f"{text!r} names no failure rates: write NAME=SHARE,... with {names}") from None


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free one"""
    dialect: Dialect = Dialect.VLLM
    model: str = "scripted"
    seed: int = 0
    """engines of one seed give the same answers"""
    skill: float = 0.5
    """share of the questions of the built-in environments that are answered well"""
    latency_s: Distribution = AT_ONCE
    completion_tokens: Distribution = A_FEW_LINES
    """at least what the answer itself takes"""
    routes: RouteShape | None = None
    failures: FailureRates = FailureRates()
    max_model_len: int = 131_072
    max_request_bytes: int = 16 * 2**20
    """a prompt of `max_model_len` tokens is below 1 MB: whatever is much larger is a mistake"""

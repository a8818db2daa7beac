"""What an engine is told when it starts."""

from dataclasses import dataclass, fields
from enum import StrEnum

from penstock.errors import ConfigError
from services.engine.draws import Distribution


class Dialect(StrEnum):
    """Who `/v1/chat/completions` sounds like."""

    VLLM = "vllm"
    SGLANG = "sglang"


class Form(StrEnum):
    """How routed experts are written: the four forms of `penstock.engines.routed_experts`."""

    OBJECT = "object"
    NPY = "npy"
    BARE = "bare"
    LISTS = "lists"


@dataclass(frozen=True, kw_only=True)
class RouteShape:
    layers: int
    """0: none are sent"""
    topk: int
    experts: int
    form: Form | None = None
    """None: stock vLLM's chat sends `npy`, SGLang's `bare`, `/inference/v1/generate` `object`"""

    def __post_init__(self) -> None:
        if self.layers < 0 or self.topk < 1 or not 2 <= self.experts <= 65536:
            raise ConfigError("routed experts need a top-k of at least 1, and 2 to 65536 experts")


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
    host: str
    port: int
    """0: any free one"""
    dialect: Dialect
    seed: int
    """engines of one seed give the same answers"""
    skill: float
    """share of the questions of the built-in environments that are answered well"""
    latency_s: Distribution
    completion_tokens: Distribution
    """at least what the answer itself takes"""
    routes: RouteShape
    failures: FailureRates
    max_model_len: int

"""Settings of the engine, as the command line gives them."""

from dataclasses import astuple, dataclass, fields
from typing import Literal

from headpond.demo.scripted_engine.draws import Distribution
from headpond.errors import ConfigError

# The server that `/v1/chat/completions` imitates.
Dialect = Literal["vllm", "sglang"]
# Logprobs are those after or before the temperature, like vLLM's `--logprobs-mode`.
LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]
# Encodings of routed experts that `headpond.engines.responses.routed_experts` reads.
ExpertForm = Literal["object", "npy", "bare"]


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    layers: int  # 0: no routed experts are sent
    topk: int
    experts: int
    # None: vLLM sends `npy`, SGLang `bare`; prime-rl's fork of vLLM sends `object`
    form: ExpertForm | None = None

    def __post_init__(self) -> None:
        if self.layers < 0 or self.topk < 1 or not 2 <= self.experts <= 65536:
            raise ConfigError("routed experts need --layers >= 0, --topk >= 1 and --experts from 2 to 65536")


@dataclass(frozen=True, kw_only=True)
class FailureRates:
    """Share of requests that fail or are answered oddly, by kind."""

    error: float = 0.0  # answered with status 500
    malformed: float = 0.0  # status 200 with an invalid body
    hang: float = 0.0  # never answered
    disconnect: float = 0.0  # the connection closes in the middle of the body
    abort: float = 0.0  # status 200 with finish reason `abort`, and the first tokens or none
    thought: float = 0.0  # cut off while it thinks: a reasoning parser finds no content
    sentinel: float = 0.0  # the last token has no logprob: it is sent as -9999.0
    no_experts: float = 0.0  # sent without routed experts

    def __post_init__(self) -> None:
        rates = astuple(self)
        if not all(rate >= 0 for rate in rates) or sum(rates) > 1:
            raise ConfigError(f"--failures: rates must not be negative, nor more than 1 together; they are {rates}")

    @classmethod
    def parse(cls, text: str) -> "FailureRates":
        """`error=0.01,hang=0.002`"""
        pairs = [pair.partition("=") for pair in text.split(",") if pair]
        try:
            return cls(**{name: float(rate) for name, _, rate in pairs})
        except (TypeError, ValueError):
            names = ", ".join(field.name for field in fields(cls))
            raise ConfigError(f"--failures: cannot read {text!r}: write NAME=SHARE,... with {names}") from None


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    host: str
    port: int  # 0: any free port
    dialect: Dialect
    seed: int  # engines with the same seed give the same responses
    skill: float  # share of good answers to questions of the built-in environments
    latency_s: Distribution
    completion_tokens: Distribution  # the scripted answer is a lower limit
    routed_experts: ExpertShape
    failures: FailureRates
    max_model_len: int
    # name in `/v1/models`; a request may name any other model, as if it were an adapter
    served_model_name: str = "policy"
    logprobs_mode: LogprobsMode = "processed_logprobs"
    # whether there are control endpoints: vLLM has them with VLLM_SERVER_DEV_MODE=1
    dev_mode: bool = True
    # whether chats with tools are answered: vLLM needs --enable-auto-tool-choice
    auto_tool_choice: bool = True
    # `tiny-moe`: completions are sampled from that model, whose first weights are drawn by
    # `seed`; None: scripted
    model: str | None = None

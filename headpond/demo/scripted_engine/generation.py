"""Generated tokens: a pure function of the prompt's tokens, the request's seed, the weights' version and the engine's
settings.

`ScriptedSampler` has no model; `model_sampler.ModelSampler` has one. A prompt that ends in the middle of
an answer is continued: an answer in parts has the same tokens as one in a piece.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headpond.demo.scripted_engine.completion_requests import CompletionRequest
from headpond.demo.scripted_engine.draws import Draws
from headpond.demo.scripted_engine.expert_table import ExpertTable, RoutedExperts
from headpond.demo.scripted_engine.options import EngineSettings
from headpond.demo.scripted_engine.scripted_policy import ScriptedAnswer, scripted_answer
from headpond.demo.scripted_engine.served_weights import Flight, TokenSpan, Weights
from headpond.errors import BadRequest
from headpond.renderers import bytes_chatml
from headpond.turn import Ids, Message

WORDS = ["so", "we", "look", "at", "what", "is", "left", "of", "it", "once", "more", "and", "take", "the", "next"]
# Filler before the scripted answer, cut to the drawn length from a drawn start.
FILLER = bytes_chatml.encode_text(" ".join(WORDS[place * place % 89 % len(WORDS)] for place in range(1_000)))

# Few distinct logprobs, so that every token's JSON can be prepared.
LOGPROB_LEVELS = [-float(f"{level:.6f}") for level in np.geomspace(1e-4, 8, 32)]


# The end of a prompt: an opened message of the assistant.
OPENING = bytes_chatml.encode([])


@dataclass(frozen=True, kw_only=True)
class Generation:
    id: str
    completion_ids: Ids
    levels: NDArray[np.int64]  # index into LOGPROB_LEVELS, by token
    message: Message
    finish_reason: str
    latency_s: float
    filler: int = 0  # first tokens that are filler: they depend on the weights
    reasoning: str | None = None  # a thought that was cut off
    logprobs: NDArray[np.float64] | None = None  # logprobs of a model, in place of `levels`
    # the tokens that each token was drawn from, of a model with top_k
    sampling_mask: Sequence[Ids] | None = None
    unknown_logprobs: int = 0  # last tokens whose logprob is sent as -9999.0

    @property
    def thoughts(self) -> str | None:
        return self.reasoning or self.message.get("reasoning_content")

    @property
    def aborted(self) -> bool:
        return self.finish_reason == "abort"

    @property
    def ended_early(self) -> bool:
        return self.finish_reason in ("length", "abort")

    def sampled_by(self, versions: Sequence[tuple[int, int, int]]) -> "Generation":
        """The completion whose tokens `[start, end)` were sampled by weights of a version, for each (version, start,
        end). Version 0 changes nothing."""
        if not any(version for version, _, _ in versions):
            return self
        ids = self.completion_ids.copy()
        for version, start, end in versions:
            filler = slice(start, min(end, self.filler))
            ids[filler] = shifted(ids[filler], version)
        message = bytes_chatml.decode_completion(ids)
        if self.reasoning is not None:
            return replace(self, completion_ids=ids, reasoning=message["content"])
        return replace(self, completion_ids=ids, message=message)

    def stopped_at(self, tokens: int) -> "Generation":
        """Aborted after some tokens."""
        return replace(self._first(tokens), finish_reason="abort")

    def thinking(self) -> "Generation":
        """The first half, as a thought that `max_tokens` cut off: a reasoning parser finds no content in it."""
        half = self._first(max(1, len(self.completion_ids) // 2))
        message: Message = {"role": "assistant", "content": None}
        return replace(half, reasoning=half.message["content"], message=message, finish_reason="length")

    def without_last_logprob(self) -> "Generation":
        return replace(self, unknown_logprobs=1)

    def _first(self, tokens: int) -> "Generation":
        ids = self.completion_ids[:tokens]
        logprobs = None if self.logprobs is None else self.logprobs[:tokens]
        mask = self.sampling_mask and self.sampling_mask[:tokens]
        first = replace(self, completion_ids=ids, levels=self.levels[:tokens], logprobs=logprobs, sampling_mask=mask)
        return replace(first, message=bytes_chatml.decode_completion(ids))


def shifted(ids: Ids, version: int) -> Ids:
    """Filler as the weights of a version write it: its letters are moved along the alphabet."""
    letters = (ids >= ord("a")) & (ids <= ord("z"))
    return np.where(letters, (ids - ord("a") + version) % 26 + ord("a"), ids).astype(np.int32)


def answer_from(prompt_ids: Ids) -> int:
    """Where the answer begins that the prompt has opened; its end if the prompt is not ChatML."""
    starts = np.flatnonzero(prompt_ids == bytes_chatml.MESSAGE_START)
    opened = int(starts[-1]) + len(OPENING) if len(starts) else len(prompt_ids)
    is_open = np.array_equal(prompt_ids[opened - len(OPENING) : opened], OPENING)
    return opened if is_open and bytes_chatml.MESSAGE_END not in prompt_ids[opened:] else len(prompt_ids)


def draws_of(request: CompletionRequest, settings: EngineSettings, session: bytes) -> Draws:
    """A request without a seed is seeded by its session, so that rollouts of one example differ."""
    seed = session if request.seed is None else b"seed %d" % request.seed
    prompt_ids = request.prompt_ids[: answer_from(request.prompt_ids)]
    return Draws(prompt_ids.tobytes(), seed, b"%d" % settings.seed)


def room_for(request: CompletionRequest, settings: EngineSettings) -> int:
    """Tokens that may still be sampled. BadRequest if there is no room for one."""
    limit, tokens = settings.max_model_len, len(request.prompt_ids)
    if tokens >= limit:
        raise BadRequest(f"this model's maximum context length is {limit} tokens; the prompt has {tokens}")
    return limit - tokens


def generate(request: CompletionRequest, draws: Draws, settings: EngineSettings) -> Generation:
    room = room_for(request, settings)
    answer = scripted_answer(bytes_chatml.decode_messages(request.prompt_ids), draws, settings.skill) or ScriptedAnswer(
        text=""
    )
    answer_ids = bytes_chatml.encode_completion(answer.message)
    begun = request.prompt_ids[answer_from(request.prompt_ids) :]
    length = round(settings.completion_tokens.at(draws.uniform("length")))
    length = max(length, len(answer_ids), len(begun) + 1)  # another seed may have begun a longer answer
    limit = len(begun) + min(room, request.max_tokens or room)
    place = draws.integer("thoughts", 0, len(FILLER) - 1)
    filler = np.resize(FILLER[place:], min(limit, length - len(answer_ids)))
    whole = np.concatenate([filler, answer_ids])[:limit]
    levels = _levels(len(whole), draws)
    if settings.logprobs_mode == "processed_logprobs":
        levels = _at_temperature(levels, request.temperature)
    ids, levels = whole[len(begun) :], levels[len(begun) :]
    message = bytes_chatml.decode_completion(ids)
    return Generation(
        id=f"{draws.seed:016x}",
        completion_ids=ids,
        levels=levels,
        message=message,
        finish_reason="length" if length > limit else "tool_calls" if message.get("tool_calls") else "stop",
        latency_s=settings.latency_s.at(draws.uniform("latency")),
        filler=max(0, len(filler) - len(begun)),
    )


def _levels(tokens: int, draws: Draws) -> NDArray[np.int64]:
    """Spread evenly over LOGPROB_LEVELS, which are dense near 0: most tokens are nearly certain."""
    places = np.arange(tokens, dtype=np.uint64) + np.uint64(draws.seed >> 1)
    return (places * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(59)).astype(np.int64)


def _at_temperature(levels: NDArray[np.int64], temperature: float | None) -> NDArray[np.int64]:
    """Other levels at other temperatures; those at 1 stay."""
    if temperature is None or temperature == 1:
        return levels
    return (levels + 1 + round(1000 * temperature) % (len(LOGPROB_LEVELS) - 1)) % len(LOGPROB_LEVELS)


# Makes an odd answer of a completion, for `--failures`.
Alter = Callable[[Generation], Generation]


@dataclass(frozen=True, kw_only=True)
class Sampled:
    generation: Generation
    spans: Sequence[TokenSpan]  # which weights sampled which tokens
    experts: RoutedExperts | None


class ScriptedSampler:
    """Completions are a pure function of the request, and of the weights' versions."""

    def __init__(self, settings: EngineSettings, weights: Weights) -> None:
        self._settings = settings
        self._weights = weights
        self._experts = ExpertTable(settings.routed_experts) if settings.routed_experts.layers else None

    async def sample(self, request: CompletionRequest, draws: Draws, flight: Flight, alter: Alter) -> Sampled:
        generation = alter(generate(request, draws, self._settings))
        await self._weights.sample(flight, generation.latency_s)
        if flight.aborted:
            generation = generation.stopped_at(len(generation.completion_ids) // 2)
        tokens = len(generation.completion_ids)
        spans = flight.spans(self._weights.state, tokens)
        if flight.adapter is not None:
            sampled = generation.sampled_by([(flight.adapter, 0, tokens)])
        else:
            sampled = generation.sampled_by([(span.state.version, span.start, span.end) for span in spans])
        experts = None if sampled.aborted else self._experts  # vLLM sends none with an aborted answer
        return Sampled(generation=sampled, spans=spans, experts=experts)

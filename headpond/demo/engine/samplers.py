"""How completions come about: `Sampler` is what the server asks; `ScriptedSampler` answers without a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headpond.demo.engine.draws import Draws
from headpond.demo.engine.expert_table import ExpertTable, RoutedExperts
from headpond.demo.engine.generation import Generation, generate
from headpond.demo.engine.requests import CompletionRequest
from headpond.demo.engine.settings import EngineSettings
from headpond.demo.engine.weights import Flight, TokenSpan, Weights

Alter = Callable[[Generation], Generation]
"""Makes an odd answer of a completion, as `--failures` says."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    generation: Generation
    spans: Sequence[TokenSpan]
    """which weights sampled which tokens"""
    experts: RoutedExperts | None


class Sampler(Protocol):
    async def sample(self, request: CompletionRequest, draws: Draws, flight: Flight, alter: Alter) -> Sampled:
        """Until the completion has ended, or its flight was aborted."""
        ...


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

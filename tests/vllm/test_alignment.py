"""Every trained token has the logprob, and every row the experts, of Hugging Face's forward under its version."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.alignment import MISSING, Alignment, Reference, Sample, Weights, align, shifted, weights_of
from support.vllm_playing import Table
from support.vllm_server import VllmServer

Aligned = Callable[..., Alignment]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chats(table: Table, aligned: Aligned, temperature: float) -> None:
    played = table.play(8, turns=3, sampling={"temperature": temperature})
    found = aligned(played)
    assert found.largest < 1e-5


def test_tool_calls(table: Table, aligned: Aligned) -> None:
    played = table.play(8, turns=2, tools=True, text="What is {example} plus {other}?")
    aligned(played)


def test_cached_prefixes(table: Table, server: VllmServer, aligned: Aligned) -> None:
    hits = server.metric("vllm:prefix_cache_hits_total")
    text = "Say something about the quick brown fox and the lazy dog, {example}."
    played = table.play(4, turns=4, text=text)
    assert server.metric("vllm:prefix_cache_hits_total") > hits
    aligned(played)


def test_weights_loaded_between_rollouts(table: Table, server: VllmServer, weights: Weights, aligned: Aligned) -> None:
    played = table.play(4, turns=2)
    for version in (1, 2):
        server.load(weights[version], version)
        played += table.play(4, turns=2, version=version)
    assert aligned(played).versions == {0, 1, 2}


@pytest.fixture(scope="module")
def recorded() -> dict[str, Sample]:
    return {}


@pytest.fixture
def sample(recorded: dict[str, Sample], table: Table, server: VllmServer) -> Sample:
    """Two turns of one rollout, aligned."""
    if "sample" not in recorded:
        played = table.play(8, turns=2)
        recorded["sample"] = next(each.samples[0] for each in played if len(each.samples) == 1)
    return recorded["sample"]


@pytest.fixture
def experts(models: Path) -> Weights:
    return weights_of(models, "moe")


@pytest.fixture
def routed(sample: Sample, reference: Reference, experts: Weights) -> Sample:
    """The same tokens, as the mixture of experts would have sampled them."""
    logprobs, rows = reference.forward(experts[0], sample)
    rows[-1] = MISSING
    return replace(sample, logprobs=logprobs, experts=rows)


class TestTheCheckItself:
    """It fails if anything is shifted by one."""

    def test_passes_as_recorded(self, sample: Sample, reference: Reference, weights: Weights) -> None:
        assert not align([sample], reference, weights).problems

    @pytest.mark.parametrize("column", ["logprobs", "ids", "trained"])
    def test_one_token(self, sample: Sample, reference: Reference, weights: Weights, column: str) -> None:
        wrong = shifted(sample, column)
        if column == "trained":
            wrong = replace(wrong, versions=np.roll(sample.versions, 1))
        assert align([wrong], reference, weights).problems

    def test_one_version(self, sample: Sample, reference: Reference, weights: Weights) -> None:
        later = np.where(sample.versions == MISSING, MISSING, sample.versions + 1)
        assert align([replace(sample, versions=later)], reference, weights).problems

    def test_the_version_of_the_last_turn(self, sample: Sample, reference: Reference, weights: Weights) -> None:
        context = np.flatnonzero(sample.versions == MISSING).max()
        later = sample.versions.copy()
        later[context + 1 :] += 1
        assert align([replace(sample, versions=later)], reference, weights).problems

    def test_one_logprob(self, sample: Sample, reference: Reference, weights: Weights) -> None:
        logprobs = sample.logprobs.copy()
        logprobs[-1] -= 2e-4
        assert align([replace(sample, logprobs=logprobs)], reference, weights).problems

    def test_one_row(self, routed: Sample, reference: Reference, experts: Weights) -> None:
        found = align([routed], reference, experts)
        assert (found.problems, found.rows) == ([], len(routed.ids) - 1)
        assert align([shifted(routed, "experts")], reference, experts).problems

    def test_one_expert(self, routed: Sample, reference: Reference, experts: Weights) -> None:
        assert routed.experts is not None
        routed.experts[5, 1, 0] = (routed.experts[5, 1] + 1).max() % 8
        assert align([routed], reference, experts).problems

    def test_what_is_not_exact_is_left_out(self, sample: Sample, reference: Reference, weights: Weights) -> None:
        inexact = replace(sample, exact=np.zeros_like(sample.exact), logprobs=sample.logprobs - 1)
        found = align([inexact], reference, weights)
        assert (found.tokens, found.rows, found.problems) == (0, 0, [])
        assert found.left_out == (sample.trained != 0).sum()

"""Sealed batches and tiny Qwen3 models for the tests of trainers with torch."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from headpond import BatchReader
from headpond.batches import Batch
from headpond.batches.plan import PackingRules
from support.rollouts import MadeTurn, RolloutMaker, plan_of, seal
from support.stores import directory_store

VOCABULARY = 32
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3}
SHORT, LONG = MadeTurn(context=2, completion=3, temperature=0.5), MadeTurn(context=4, completion=7)


class Bounded:
    """A generator whose token ids and experts are small."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rng, name)

    def integers(self, low: int, high: int | None = None, size: Any = None, **more: Any) -> Any:
        return self._rng.integers(low, min(high, VOCABULARY) if high is not None else None, size, **more)


def maker_in(run_dir: Path, *, experts: str | None = None, seed: int = 0) -> RolloutMaker:
    maker = RolloutMaker(store=directory_store(run_dir / "store"), experts=experts, seed=seed)
    maker.rng = Bounded(maker.rng)  # pyright: ignore[reportAttributeAccessIssue]
    return maker


def sealed(run_dir: Path, *, data_ranks: int = 1, experts: str | None = None) -> list[Batch]:
    """Every rank of a step with samples of several lengths, whose ids are in the vocabulary."""
    maker = maker_in(run_dir, experts=experts)
    made = [maker.make("g-0", [[SHORT, LONG], [SHORT]]), maker.make("g-1", [[LONG]]), maker.make("g-2", [[SHORT]])]
    rules = PackingRules(data_ranks=data_ranks, seq_len=32, pad_to_multiple_of=4)
    seal(maker.store, plan_of(made, rules=rules, normalise="sample"))
    return [next(BatchReader(run_dir, data_rank=rank, data_ranks=data_ranks)) for rank in range(data_ranks)]


def seal_groups(run_dir: Path, *, steps: int, first: int = 0, size: int = 2, data_ranks: int = 1) -> None:
    """Steps of two whole groups of rollouts with one sample each."""
    for step in range(first, first + steps):
        maker = maker_in(run_dir, seed=step)
        made = [
            maker.make(f"s{step}g{group}-{number}", [[SHORT if number else LONG]], group=f"g{group}")
            for group in range(2)
            for number in range(size)
        ]
        seal(maker.store, plan_of(made, step=step, data_ranks=data_ranks))


def model_of(kind: str) -> Any:
    torch.manual_seed(3)
    config = Qwen3MoeConfig(**SIZES, **EXPERTS) if kind == "moe" else Qwen3Config(**SIZES)
    built = (Qwen3MoeForCausalLM if kind == "moe" else Qwen3ForCausalLM)(config).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(0, 0.3)
    return built

"""Token-in/token-out with a real server (`--enable-scale-out`): Headpond renders, the engine only samples."""

from collections.abc import Callable

import pytest
from support.alignment import Alignment
from support.vllm_playing import Table
from support.vllm_server import AnyEngine

Aligned = Callable[..., Alignment]


@pytest.fixture
def table(table: Table, tokenizer: str) -> Table:
    renderer = {"model": tokenizer, "chat_template_kwargs": {"enable_thinking": False}}
    table.settings["engine"]["dialect"] = "generate"
    table.settings["policy"] = {"renderer": renderer}
    table.more = {}
    return table


def test_turns_extend_each_other(table: Table) -> None:
    (played,) = table.play(turns=3)
    assert len(played.answers) == 3
    assert len(played.samples) == 1
    assert played.columns.loss_mask.sum() == sum(map(len, played.completions)) > 0


def test_the_same_seed_samples_the_same_tokens(table: Table) -> None:
    first, again, other = (table.play(seed=seed)[0].completions for seed in (5, 5, 6))
    assert first == again != other


def test_a_prompt_beyond_the_context_is_a_failure_of_the_policy(table: Table, engine: AnyEngine) -> None:
    (played,) = table.play(text="word " * 2 * engine.max_model_len)
    assert "context limit" in (played.result.policy_error or "")


def test_64_rollouts_at_once(table: Table) -> None:
    played = table.play(64, turns=2, sampling={"max_tokens": 16})
    assert [each.result.turns for each in played] == [2] * 64


def test_every_token_is_aligned(table: Table, aligned: Aligned) -> None:
    played = table.play(8, turns=3, sampling={"temperature": 0.8})
    played += table.play(8, turns=2, tools=True, text="What is {example} plus {other}?")
    aligned(played)

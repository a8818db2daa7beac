import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headpond.data import STATE_LIMIT_BYTES, PlayedGroup
from headpond.data.samplers import ENTRIES_MOST, SolveRate, Weighted
from headpond.errors import ConfigError


def drawn(sampler: Any, *counts: int, state: Any = None) -> list[int]:
    """Through JSON between two draws, as in a run."""
    examples: list[int] = []
    for count in counts:
        more, state = sampler.draw(count, [], json.loads(json.dumps(state)))
        examples += more
    return examples


def group(example: int, *rewards: float) -> PlayedGroup:
    return PlayedGroup(example=example, rewards=rewards)


def test_examples_are_drawn_by_their_weights() -> None:
    counts = Counter(drawn(Weighted(size=4, seed=3, weights=[1, 0, 2, 1]), *[500] * 8))
    assert counts[1] == 0
    assert 0.45 < counts[2] / 4000 < 0.55
    assert abs(counts[0] - counts[3]) < 200


def test_weights_are_read_from_a_file(tmp_path: Path) -> None:
    np.save(tmp_path / "weights.npy", np.array([0.0, 3.0, 0.0], np.float32))
    (tmp_path / "weights.json").write_text("[0, 3, 0]")
    for name in ("weights.npy", "weights.json"):
        assert set(drawn(Weighted(size=3, seed=1, weights=str(tmp_path / name)), 20)) == {1}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 2.0], "weights has 2 numbers: the environment has 3 examples"),
        ([0, 0, 0], "not all 0"),
        ([1, -1, 1], "none below 0"),
        ([1, float("inf"), 1], "finite"),
        ("/nowhere/weights.npy", "weights: /nowhere/weights.npy cannot be read as numbers"),
    ],
)
def test_wrong_weights_are_refused(weights: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Weighted(size=3, seed=0, weights=weights)


def test_a_new_data_set_is_played_once_before_its_solve_rates_matter() -> None:
    assert sorted(drawn(SolveRate(size=30, seed=5), 7, 7, 16)) == list(range(30))


def test_examples_that_are_always_or_never_solved_are_passed_over() -> None:
    sampler = SolveRate(size=30, seed=5, skip_solved=0.9, skip_unsolved=0.5)
    first, state = sampler.draw(30, [], None)
    played = [group(example, *[(1.0, 1.0), (0.0, 0.0), (0.0, 1.0)][example % 3]) for example in first]
    counts = Counter[int]()
    for _ in range(40):
        examples, state = sampler.draw(30, played, state)
        counts.update(example % 3 for example in examples)
        played = []
    assert 0.05 < counts[0] / counts[2] < 0.16
    assert 0.4 < counts[1] / counts[2] < 0.6


def test_what_an_example_did_last_decides() -> None:
    sampler = SolveRate(size=2, seed=0, skip_solved=1.0)
    _, state = sampler.draw(2, [], None)
    examples, state = sampler.draw(10, [group(0, 1.0, 1.0), group(1, 0.5)], state)
    assert set(examples) == {1}
    examples, state = sampler.draw(10, [group(0, 1.0, 0.0), group(1, 1.0, 1.0)], state)
    assert set(examples) == {0}


def test_a_data_set_that_is_all_solved_is_still_played() -> None:
    sampler = SolveRate(size=4, seed=0, skip_solved=1.0, skip_unsolved=1.0)
    solved = [group(example, 1.0, 1.0) for example in range(4)]
    assert len(drawn(sampler, 5, 5, state=sampler.draw(4, solved, None)[1])) == 10


def test_the_state_of_ten_million_examples_stays_small() -> None:
    sampler, results = SolveRate(size=10_000_000, seed=0), np.random.default_rng(0).integers(0, 3, ENTRIES_MOST)
    rewards = {0: (0.0, 0.0), 1: (0.0, 1.0), 2: (1.0, 1.0)}
    played = [group(example, *rewards[result]) for example, result in enumerate(results.tolist())]
    examples, state = sampler.draw(1024, played, None)
    assert len(set(examples)) == 1024
    assert len(json.dumps(state)) < STATE_LIMIT_BYTES

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headpond.data import Drawn, PlayedGroup, draw
from headpond.data.samplers import STATE_LIMIT_BYTES, load_class
from headpond.errors import ConfigError, StageError

MODULE = """
class Hardest:
    def __init__(self, *, size, seed, first=0):
        self.size, self.first = size, first

    def draw(self, count, played, state):
        rewards = {int(example): reward for example, reward in (state or {}).items()}
        rewards |= {group.example: sum(group.rewards) for group in played}
        ranked = sorted(range(self.first, self.size), key=lambda example: rewards.get(example, 0.0))
        return ranked[:count], rewards

class Wrong(Hardest):
    def draw(self, count, played, state):
        return {"far": ([self.size], None), "many": ([0] * (count + 1), None), "single": [0], "object": ([0], object()),
                "large": ([0], "x" * 200_000)}[NAMES[self.first]]

NAMES = ["far", "many", "single", "object", "large", "unknown"]

class Silent:
    pass

class Short:
    def draw(self, count):
        return []

plain = Hardest(size=3, seed=0)
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_samplers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_samplers", None)


def drawing(name: str, *, state: str | None = None, played: tuple[PlayedGroup, ...] = (), **options: Any) -> Drawn:
    return draw(name, options, environment="sums", size=5, seed=1, count=3, played=played, state=state)


def test_a_sampler_is_told_what_was_played_and_keeps_a_state() -> None:
    drawn = drawing("own_samplers:Hardest", played=(PlayedGroup(example=0, rewards=(1.0, 0.5), dropped="overlong"),))
    assert drawn.examples == [1, 2, 3]
    again = drawing("own_samplers:Hardest", state=drawn.state, played=(PlayedGroup(example=1, rewards=(2.0,)),))
    assert again.examples == [2, 3, 4]
    assert json.loads(again.state) == {"sampler": "own_samplers:Hardest", "state": {"0": 1.5, "1": 2.0}}
    assert drawing("own_samplers:Hardest", first=4).examples == [4]


def test_another_sampler_begins_without_the_state() -> None:
    state = drawing("own_samplers:Hardest", played=(PlayedGroup(example=0, rewards=(1.0,)),)).state
    assert len(drawing("solve_rate", state=state).examples) == 3


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (0, "returned example 5: the environment has 5, counted from 0"),
        (1, "returned 4 examples: 3 were asked for"),
        (2, r"returned \[0\] \(list\): it must return \(examples, next state\)"),
        (3, "a state that is not JSON-serializable"),
        (4, f"a state of .* bytes: the limit is {STATE_LIMIT_BYTES}"),
        (5, "the sampler own_samplers:Wrong of environment 'sums' failed: KeyError"),
    ],
)
def test_a_wrong_draw_is_told(first: int, message: str) -> None:
    with pytest.raises(StageError, match=message):
        drawing("own_samplers:Wrong", first=first)


def test_options_that_the_class_does_not_take_are_told() -> None:
    with pytest.raises(StageError, match=r"environments.sums.sampler = 'own_samplers:Hardest' cannot be made.*last"):
        drawing("own_samplers:Hardest", last=3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_samplers:plain", "is not a class"),
        ("own_samplers:Silent", r"has no method draw\(self, count, played, state\)"),
        ("own_samplers:Short", "takes"),
        ("own_samplers:Hardset", "did you mean 'Hardest'"),
        ("wieghted", "did you mean 'weighted'"),
    ],
)
def test_a_name_that_is_no_sampler_is_refused_at_start(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_class(name, setting="environments.sums.sampler")

"""Seeded random schedules of faults, with real processes: nothing is lost, doubled, swept, biased or left behind.

`make chaos` plays 200 schedules of ten faults, listed in `support/chaos/faults.py`; the test run plays one of three.
A failed one is played again by `pytest tests/chaos/test_schedule.py --chaos-rounds 200 --chaos-faults 10 -k NUMBER-`.
"""

from collections import Counter
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from statistics import pstdev

import pytest
from support.chaos import log
from support.chaos.checks import LIMIT_Z, drawn_z
from support.chaos.draw import CYCLE, FAULTS_EACH, Schedule, schedules
from support.chaos.environments import tokens_of
from support.chaos.faults import FAULTS, HELD, IN_WORLDS
from support.chaos.play import played_in

from bench.harness.noop.stages import chance
from headpond.ids import GroupId, RolloutId


@pytest.mark.timeout(700)
def test_a_random_schedule_of_faults_loses_nothing(
    tmp_path: Path, request: pytest.FixtureRequest, schedule: Schedule
) -> None:
    line = played_in(tmp_path / "run", schedule, request.config.getoption("--chaos-rounds"))
    path: Path | None = request.config.getoption("--chaos-log")
    if path:
        log.append(path, line)
    assert line["result"] == log.HELD, line["result"]


def test_each_fault_is_in_at_least_fifty_of_two_hundred_schedules() -> None:
    drawn = schedules(1, 200)
    counts = Counter(name for schedule in drawn for name in set(schedule.faults))
    assert set(counts) == set(FAULTS)
    assert min(counts.values()) >= 50
    assert all(len(set(schedule.faults)) == FAULTS_EACH for schedule in drawn)
    assert all(schedule.world in IN_WORLDS[name] for schedule in drawn for name in schedule.faults)
    assert schedules(1, 20) == drawn[:20]
    assert {name for names in IN_WORLDS.values() for name in names} == set(CYCLE)
    assert set(FAULTS) > HELD


def test_a_biased_draw_is_found() -> None:
    """A tenth of the longest third is missing: twelve standard errors."""
    planned = [float(length) for length in range(1200)]
    fair, biased = planned[::2], [length for length in planned if length < 800 or length % 10]
    assert abs(drawn_z(fair, planned)) < 1
    assert drawn_z(biased, planned) < -LIMIT_Z


@pytest.mark.parametrize(
    "value", [tokens_of, lambda example, seed: chance(seed, RolloutId(str(GroupId(example)), 0), "tokens")],
    ids=["engine", "noop"],
)  # fmt: skip
def test_the_sum_over_the_schedules_of_a_fair_series_is_standard_normal(value: Callable[[int, int], float]) -> None:
    """Every schedule of 60 series delivers the first 98 of 110 groups: what they share would show most then."""

    def series(first_seed: int) -> float:
        planned = [[float(value(example, first_seed + number)) for example in range(110)] for number in range(120)]
        return sum(drawn_z(lengths[:98], lengths) for lengths in planned) / sqrt(len(planned))

    assert 0.75 < pstdev(series(1000 * seed) for seed in range(1, 61)) < 1.25


def test_the_log_sums_up_the_newest_line_of_each_schedule(tmp_path: Path) -> None:
    path = tmp_path / "log"
    line = {
        "seed": 1, "number": 0, "world": "noop", "faults": ["kill_worker", "kill_redis"], "seconds": 20.0,
        "unseen": ["kill_redis"], "exits": [], "steps": 12, "z": {"length": 1.0, "reward": -0.5}, "result": "held",
    }  # fmt: skip
    log.append(path, line | {"result": "AssertionError"})
    assert log.summary(path)["held"] == 0
    for number in (0, 1, 2, 3):
        log.append(path, line | {"number": number, "run_seed": number})
    result = log.summary(path)
    assert (result["schedules"], result["held"], result["steps"]) == (4, 4, 48)
    assert result["faults"]["kill_redis"] == result["without_visible_effect"]["kill_redis"] == 4
    assert result["faults"]["kill_engine"] == 0
    assert result["bias_z"] == {"length": 2.0, "reward": -1.0}

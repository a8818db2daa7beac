import pytest

from bench.steps import run

pytestmark = pytest.mark.slow


def test_every_step_of_a_worker_s_loop_is_timed() -> None:
    report = run(quick=True)
    assert (report.bench, report.quick) == ("steps", True)
    # Three turns each, with at least five steps per turn.
    assert report.figures["16 rollouts: steps"] > 16 * 3 * 5
    assert 0 < report.figures["16 rollouts: a step's CPU p99, ms"] <= report.figures["16 rollouts: the longest, ms"]
    assert report.figures["16 rollouts: stops for the collector"] > 1
    assert [target.name for target in report.targets] == ["16 rollouts: share of steps over 1 ms"]

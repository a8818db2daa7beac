import pytest

from bench.lag import run

pytestmark = pytest.mark.slow


def test_both_pipelines_deliver_and_the_wide_one_receives_more() -> None:
    report = run(quick=True)  # raises unless every rollout is delivered and accounted for
    assert (report.bench, report.rounds, report.quick) == ("lag", 1, True)
    assert report.figures["10x: GB received a step"] > 5 * report.figures["1x: GB received a step"] > 0
    assert report.figures["1x: orchestrator's memory, MB"] > 0
    assert [target.limit for target in report.targets] == [5, 5, 5, 200, 2, 2]

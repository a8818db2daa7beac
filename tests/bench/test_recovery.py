import pytest

from bench.recovery import run

pytestmark = pytest.mark.slow


def test_the_killed_worker_s_rollouts_run_elsewhere_and_none_is_lost() -> None:
    report = run(quick=True)  # raises unless all of them ran again and the run ended
    assert (report.bench, report.rounds, report.quick) == ("recovery", 1, True)
    assert report.figures["rollouts running at the kill"] == 16
    until_running, lost, problems = report.targets
    assert until_running.limit == report.figures["lease, s"] + 5
    assert lost.value == lost.limit == 0
    assert problems.value == problems.limit == 0

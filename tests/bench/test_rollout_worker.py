import pytest

from bench.rollout_worker import run

pytestmark = pytest.mark.slow


def test_lag_and_memory_of_both_workers_are_measured() -> None:
    report = run(quick=True)  # raises unless every rollout ended
    assert (report.bench, report.rounds, report.quick) == ("rollout-worker", 1, True)
    for case, most in {"256 x 1.3 MB": 16, "1000 x 1.3 MB": 32, "64 x 25 MB": 8}.items():
        assert report.figures[f"{case}, ours: rollouts at once, most"] == most
        assert report.figures[f"{case}, ours: turns a second"] > 0
        assert report.figures[f"{case}, ours: memory above idle, MB, most"] > 0
    assert report.figures["256 x 1.3 MB, parse all: loop's share of a core"] > 0
    assert [target.limit for target in report.targets] == [15, 15, 4, 1000, 1, 1, 1]

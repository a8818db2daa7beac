import pytest

from bench.control import KINDS, run

pytestmark = pytest.mark.slow


def test_every_process_is_counted_and_the_baseline_runs() -> None:
    report = run(quick=True)  # raises unless every rollout was delivered
    assert (report.bench, report.rounds, report.quick) == ("control", 1, True)
    assert report.figures["rollouts a round"] == 32
    assert report.figures["stock Celery, messages a second"] > 0
    by_kind = [report.figures[f"CPU, ms a rollout: {kind}"] for kind in KINDS]
    assert min(by_kind) >= 0
    assert sum(by_kind) == report.figures["CPU, ms a rollout"] > 0
    assert [(target.sense, target.limit) for target in report.targets] == [
        ("at most", 6),
        ("at least", 200),
        ("at most", 3),
    ]

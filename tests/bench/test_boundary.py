import pytest

from bench.boundary import run

pytestmark = pytest.mark.slow


def test_the_steps_differ_in_their_routed_experts_only() -> None:
    report = run(quick=True)  # raises unless every rollout is delivered and accounted for
    assert (report.bench, report.rounds, report.quick) == ("boundary", 1, True)
    for what in ("tokens", "rank files, MB"):
        assert report.figures[f"with: {what}"] == report.figures[f"without: {what}"] > 0
    assert report.figures["with: routed experts, MB"] > report.figures["without: routed experts, MB"] == 0
    assert [target.limit for target in report.targets] == [1.2]

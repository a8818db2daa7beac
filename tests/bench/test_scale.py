import pytest

from bench.scale import QUICK, SWEPT_GROUPS, run


@pytest.mark.slow
def test_every_size_is_played_and_its_steps_are_timed() -> None:
    report = run(quick=True)  # raises unless every rollout was delivered
    assert (report.bench, report.rounds, report.quick) == ("scale", 1, True)
    cases = [f"steps of {rollouts}" for rollouts in QUICK.steps]
    cases += [f"{QUICK.in_flight} in flight", f"{QUICK.open_groups} open groups"]
    for case in cases:
        assert report.figures[f"{case}: steps of the loop"] > 100
        assert report.figures[f"{case}: p99.9 of a step, CPU ms"] > 0
    assert report.figures[f"{QUICK.in_flight} in flight: running at once, most"] > 0
    assert report.figures[f"{QUICK.open_groups} open groups: orchestrator's memory, MB"] > 0
    assert report.figures[f"ledger of {QUICK.closed} rollouts: files swept"] == 8 * SWEPT_GROUPS
    named = {target.name.partition(":")[0] for target in report.targets}
    assert named == {*cases, f"{QUICK.many_steps} steps", f"ledger of {QUICK.closed} rollouts"}

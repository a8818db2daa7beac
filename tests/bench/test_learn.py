import pytest

from bench.learn import run


@pytest.mark.slow
def test_a_short_demo_is_measured() -> None:
    report = run(quick=True)
    assert (report.bench, report.rounds, report.quick) == ("learn", 1, True)
    assert (report.figures["steps"], report.figures["rollouts"]) == (2, 48)
    assert report.figures["logprobs computed again"] > 100
    targets = {target.name: target for target in report.targets}
    assert targets["reward in the first step"].value == report.figures["reward in the first step"] < 0.5
    assert targets["largest difference of a logprob"].met
    assert targets["reward in the last step"].sense == "at least"

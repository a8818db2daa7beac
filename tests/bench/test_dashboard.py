import pytest

from bench.dashboard import PAGES, ROUNDS, run


@pytest.mark.slow
def test_every_page_of_a_small_run_is_timed() -> None:
    report = run(quick=True)
    assert report.rounds == ROUNDS
    assert report.figures["rollouts"] == 20_000
    assert {f"{name}, s" for name in PAGES} <= report.figures.keys()
    assert [target.limit for target in report.targets][:3] == [0.1, 0.1, 200]

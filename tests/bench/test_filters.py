from bench.filters import ROUNDS, run


def test_filters_and_loop_match_the_same_tokens() -> None:
    report = run(quick=True)  # raises where a verdict differs
    assert report.rounds == ROUNDS
    assert report.figures["verdicts compared"] == report.figures["rollouts"] == 16
    assert report.figures["gibberish found"] == 3
    assert report.figures["repetition found"] == 2
    assert [target.limit for target in report.targets] == [50]

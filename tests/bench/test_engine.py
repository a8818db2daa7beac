from bench import engine


def test_measures_both_servers() -> None:
    report = engine.run(quick=True)
    assert report.quick
    assert report.figures["1.3 MB: bytes"] > 1_200_000
    assert report.figures["25 MB: bytes"] > 24_000_000
    assert all(figure > 0 for figure in report.figures.values())
    assert len(report.targets) == 2

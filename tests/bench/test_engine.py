import pytest

from bench import engine

pytestmark = pytest.mark.slow


def test_measures_both_servers() -> None:
    report = engine.run(quick=True)
    assert report.quick
    assert report.figures["1.3 MB: bytes"] > 1_200_000
    assert report.figures["25 MB: bytes"] > 24_000_000
    assert min(figure for name, figure in report.figures.items() if name.endswith("responses/s")) > 0
    assert min(report.figures.values()) >= 0  # a server without a core may use no CPU in a short round
    assert len(report.targets) == 2

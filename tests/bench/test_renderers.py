import pytest

from bench.renderers import run

pytestmark = pytest.mark.slow


def test_adapters_share_one_pool_and_first_callers_one_build() -> None:
    report = run(quick=True)
    assert report.figures["builds"] == 1
    assert (report.figures["pools, pinned"], report.figures["pools, unpinned"]) == (1, 2)
    assert [target.limit for target in report.targets] == [5, 1 / 20, 1, 1, 1.05]

import pytest

from bench.soak import MORE, QUICK, run

pytestmark = pytest.mark.slow


def test_300_rollouts_with_failures_leak_no_resources() -> None:
    """Too few rollouts for a verdict on memory; `make soak` plays 20,000."""
    report = run(quick=True)
    assert report.figures["rollouts"] == QUICK.rollouts
    more = {target.name: target.value for target in report.targets if not target.name.startswith("memory")}
    assert more.keys() == {f"{what} more" for what in ("descriptors", "threads", "children", "tasks", "rollouts")}
    assert more.pop("threads more") <= MORE["threads"]
    assert more.pop("descriptors more") <= 3, "a pool may grow once; 200 rollouts would leak 200"
    assert all(value <= 0 for value in more.values()), more
    assert report.figures["tasks after"] > 0

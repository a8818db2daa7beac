import pytest

from bench import sessions

pytestmark = pytest.mark.slow


def test_measures_chats_health_and_memory() -> None:
    report = sessions.run(quick=True)
    assert report.quick
    for size in ("1.3 MB", "25 MB"):
        assert report.figures[f"base64, {size}: chats/s"] > 0
    assert report.figures["base64, 1.3 MB, without a session: chats/s"] > 0
    assert report.figures["/health p95 (ms)"] > 0
    for kind in ("messages", "responses", "parallel"):
        assert report.figures[f"base64, 1.3 MB, {kind}: chats/s"] > 0
    assert len(report.targets) == 10

import pytest

from bench import sessions

pytestmark = pytest.mark.slow


def test_measures_chats_health_and_memory() -> None:
    report = sessions.run(quick=True)
    assert report.quick
    for size in ("1.3 MB", "25 MB"):
        assert report.figures[f"base64, {size}: chats/s"] > 0
    assert report.figures["/health p95 (ms)"] > 0
    for kind in ("messages", "responses", "parallel", "two servers", "without a session"):
        assert report.figures[f"base64, 1.3 MB, {kind}: chats/s"] > 0
    for name in (sessions.DIRECT, sessions.BARE, sessions.BASE):
        assert report.figures[f"{name}: MB received"] > 0
    for name in (sessions.BARE, sessions.BASE, sessions.TWO, sessions.PACED):
        assert report.figures[f"{name}: {sessions.AGAINST_ENGINE}"] > 0
    assert report.figures[f"{sessions.BASE}: {sessions.AGAINST_BARE}"] > 0
    assert len(report.targets) == 11


def test_bounds_follow_from_the_cpu_of_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "cores", lambda: 2)
    figures = {f"{sessions.DIRECT}: chats/s": 1000.0, f"{sessions.BASE}: CPU ms": 1.4}
    figures |= {f"{sessions.BASE}: engine's CPU ms": 0.5, f"{sessions.BASE}: client's CPU ms": 0.1}
    one, both, most, share = sessions.bounds(figures).values()
    assert one == pytest.approx(1 / 0.85)
    assert both == pytest.approx(2 / 0.85 - 0.6)
    assert (most, share) == (pytest.approx(1000), pytest.approx(1))

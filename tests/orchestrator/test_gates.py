import pytest
from support.clock import Clock

from orchestrator.gates import RETRY_FIRST_S, RETRY_MOST_S, Gate
from penstock.messages import Outcome


@pytest.fixture
def gate(clock: Clock) -> Gate:
    return Gate()


def test_it_is_open_until_the_engine_is_away(gate: Gate) -> None:
    assert gate.open
    gate.missed(Outcome.UNREACHABLE, "a", 1, "refused")
    assert not gate.open
    assert gate.trouble is not None
    assert "the engine cannot be reached (refused)" in gate.trouble
    gate.reached()
    assert gate.open
    assert gate.trouble is None


def test_one_scout_is_out_at_a_time_and_only_after_a_pause(gate: Gate, clock: Clock) -> None:
    gate.missed(Outcome.UNREACHABLE, "a", 1, "refused")
    assert not gate.may_send_scout()
    clock.advance(RETRY_FIRST_S)
    assert gate.may_send_scout()
    gate.sent_scout("b", 2)
    assert not gate.may_send_scout()


def test_only_a_scout_s_report_lengthens_the_pause(gate: Gate, clock: Clock) -> None:
    gate.missed(Outcome.UNREACHABLE, "a", 1, "refused")
    clock.advance(RETRY_FIRST_S)
    gate.sent_scout("b", 2)
    for job in ("c", "d"):
        gate.missed(Outcome.UNREACHABLE, job, 1, "refused")
    assert not gate.may_send_scout()
    gate.missed(Outcome.UNREACHABLE, "b", 2, "refused")
    clock.advance(RETRY_FIRST_S)
    assert not gate.may_send_scout()
    clock.advance(RETRY_FIRST_S)
    assert gate.may_send_scout()


def test_the_pause_has_a_limit(gate: Gate, clock: Clock) -> None:
    gate.missed(Outcome.UNREACHABLE, "a", 1, "refused")
    for attempt in range(20):
        clock.advance(RETRY_MOST_S)
        assert gate.may_send_scout()
        gate.sent_scout("a", attempt)
        gate.missed(Outcome.UNREACHABLE, "a", attempt, "refused")


def test_a_scout_that_was_lost_is_followed_by_another(gate: Gate, clock: Clock) -> None:
    gate.missed(Outcome.UNREACHABLE, "a", 1, "refused")
    clock.advance(RETRY_FIRST_S)
    gate.sent_scout("b", 2)
    gate.scout_lost("c")
    assert not gate.may_send_scout()
    gate.scout_lost("b")
    assert gate.may_send_scout()

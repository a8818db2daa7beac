import pytest
from support.waiting import Clock

from headpond.orchestrator.duties.housekeeping import Troubles
from headpond.orchestrator.exchange.gates import RETRY_FIRST_S, RETRY_MOST_S, Gate, Gates
from headpond.tasks.stage import Outcome


@pytest.fixture
def gate(clock: Clock) -> Gate:
    return Gate(Troubles())


def test_a_gate_is_closed_while_the_engine_is_unreachable(gate: Gate) -> None:
    assert gate.open
    gate.close(Outcome.UNREACHABLE, "a", 1, "refused")
    assert not gate.open
    assert gate.trouble.text is not None
    assert "the engine cannot be reached (refused)" in gate.trouble.text
    gate.reopen()
    assert gate.open
    assert gate.trouble.text is None


def test_one_probe_at_a_time_after_a_pause(gate: Gate, clock: Clock) -> None:
    gate.close(Outcome.UNREACHABLE, "a", 1, "refused")
    assert not gate.may_send_probe()
    clock.advance(RETRY_FIRST_S)
    assert gate.may_send_probe()
    gate.probe_sent("b", 2)
    assert not gate.may_send_probe()


def test_only_the_reply_of_a_probe_lengthens_the_pause(gate: Gate, clock: Clock) -> None:
    gate.close(Outcome.UNREACHABLE, "a", 1, "refused")
    clock.advance(RETRY_FIRST_S)
    gate.probe_sent("b", 2)
    for job in ("c", "d"):
        gate.close(Outcome.UNREACHABLE, job, 1, "refused")
    assert not gate.may_send_probe()
    gate.close(Outcome.UNREACHABLE, "b", 2, "refused")
    clock.advance(RETRY_FIRST_S)
    assert not gate.may_send_probe()
    clock.advance(RETRY_FIRST_S)
    assert gate.may_send_probe()


def test_the_pause_has_a_limit(gate: Gate, clock: Clock) -> None:
    gate.close(Outcome.UNREACHABLE, "a", 1, "refused")
    for attempt in range(20):
        clock.advance(RETRY_MOST_S)
        assert gate.may_send_probe()
        gate.probe_sent("a", attempt)
        gate.close(Outcome.UNREACHABLE, "a", attempt, "refused")


def test_a_lost_probe_is_followed_by_another(gate: Gate, clock: Clock) -> None:
    gate.close(Outcome.UNREACHABLE, "a", 1, "refused")
    clock.advance(RETRY_FIRST_S)
    gate.probe_sent("b", 2)
    gate.probe_lost("c")
    assert not gate.may_send_probe()
    gate.probe_lost("b")
    assert gate.may_send_probe()


def test_the_exclusion_of_the_worker_that_closed_a_gate_opens_it() -> None:
    troubles = Troubles()
    gates = Gates(troubles)
    closed = gates.all.values()
    for gate in closed:
        gate.close(Outcome.UNWRITTEN, "a", 1, "no space", node="bad")
    gates.worker_excluded("good")
    assert len(troubles.texts()) == len(closed)
    gates.worker_excluded("bad")
    assert troubles.texts() == []

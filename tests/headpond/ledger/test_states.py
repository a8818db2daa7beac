import itertools

import pytest

from headpond.errors import IllegalTransition
from headpond.ledger.states import IN_FLIGHT, TRANSITIONS, UNGENERATED, RolloutState, check

# A rollout's whole life; what is not here does not happen.
TRANSITION_TABLE = """
planned   -> submitted filtered evaluated
submitted -> running generated filtered dead evaluated
running   -> submitted generated filtered dead evaluated
generated -> admitted filtered dead evaluated
admitted  -> batched filtered
batched   -> delivered admitted
delivered -> trained
filtered  ->
dead      ->
trained   ->
evaluated ->
"""
LEGAL = {
    (RolloutState(old.strip()), RolloutState(new))
    for old, _, all_new in (line.partition("->") for line in TRANSITION_TABLE.strip().splitlines())
    for new in all_new.split()
}
PAIRS = list(itertools.product(RolloutState, repeat=2))


@pytest.mark.parametrize(("old", "new"), [pair for pair in PAIRS if pair in LEGAL], ids=" to ".join)
def test_a_legal_transition_is_accepted(old: RolloutState, new: RolloutState) -> None:
    check("g0000001-0", old, new)


@pytest.mark.parametrize(("old", "new"), [pair for pair in PAIRS if pair not in LEGAL], ids=" to ".join)
def test_any_other_transition_raises(old: RolloutState, new: RolloutState) -> None:
    with pytest.raises(IllegalTransition, match=f"rollout g0000001-0 .*{old} to {new}"):
        check("g0000001-0", old, new)


def test_every_state_is_reachable_and_only_final_states_have_no_exit() -> None:
    reached = {RolloutState.PLANNED}
    while more := {new for old in reached for new in TRANSITIONS[old]} - reached:
        reached |= more
    assert reached == set(RolloutState)
    ends = {state for state in RolloutState if not TRANSITIONS[state]}
    assert ends == {RolloutState.FILTERED, RolloutState.DEAD, RolloutState.TRAINED, RolloutState.EVALUATED}


def test_the_counts_of_an_audit_partition_the_states() -> None:
    counted = {RolloutState.DELIVERED, RolloutState.TRAINED, RolloutState.FILTERED, RolloutState.DEAD}
    assert counted | IN_FLIGHT == set(RolloutState) - {RolloutState.EVALUATED}
    assert not counted & IN_FLIGHT
    assert UNGENERATED < IN_FLIGHT

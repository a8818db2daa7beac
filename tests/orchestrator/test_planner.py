import pytest
from support.ledgers import admitted, configured

from orchestrator.ledger import Ledger
from orchestrator.planner import Planner
from orchestrator.states import GroupState, RolloutState
from penstock.errors import RunError


def plan_all(planner: Planner) -> None:
    while planner.plan():
        pass


def test_as_many_groups_are_begun_as_the_steps_need(ledger: Ledger) -> None:
    planner = Planner(configured(), ledger)
    plan_all(planner)
    assert len(ledger.groups) == 6
    assert [group.example for group in ledger.groups.values()] == list(range(6))
    plan_all(planner)
    assert ledger.number("rollouts_planned") == 24


def test_no_more_rollouts_are_in_flight_than_allowed(ledger: Ledger) -> None:
    planner = Planner(configured(rollouts={"max_in_flight": 10}), ledger)
    plan_all(planner)
    assert ledger.ungenerated == 8


def test_a_large_plan_is_made_in_small_pieces(ledger: Ledger) -> None:
    planner = Planner(configured(steps=100, rollouts={"max_in_flight": 1000}), ledger)
    assert planner.plan()
    assert ledger.number("rollouts_planned") == 128
    plan_all(planner)
    assert ledger.number("rollouts_planned") == 800


def test_a_group_larger_than_a_piece_is_begun_all_the_same(ledger: Ledger) -> None:
    planner = Planner(configured(rollouts={"group_size": 500, "max_in_flight": 3000}), ledger)
    plan_all(planner)
    assert ledger.number("rollouts_planned") == 3000


def test_a_group_that_was_dropped_is_replaced(ledger: Ledger) -> None:
    planner = Planner(configured(), ledger)
    plan_all(planner)
    dropped = next(iter(ledger.groups.values()))
    for rollout in dropped.rollouts:
        ledger.move(rollout, RolloutState.FILTERED, reason="zero_variance")
    ledger.enter(dropped, GroupState.CLOSED)
    plan_all(planner)
    assert ledger.number("groups_planned") == 7
    assert len(ledger.groups) == 6


def test_groups_of_an_open_step_are_not_counted_twice(ledger: Ledger) -> None:
    config = configured()
    ledger.compose(0, [admitted(ledger), admitted(ledger)])
    plan_all(Planner(config, ledger))
    assert ledger.number("groups_planned") == 6


def test_a_batch_of_rollouts_asks_for_what_partial_groups_fall_short_of(ledger: Ledger) -> None:
    planner = Planner(configured(steps=1, batch={"unit": "rollouts", "size": 9}), ledger)
    plan_all(planner)
    assert len(ledger.groups) == 3
    assert planner.groups_per_step() == 3


def test_a_run_that_drops_everything_stops_and_says_what_to_look_at(ledger: Ledger) -> None:
    planner = Planner(configured(batch={"max_empty_batches": 5}), ledger)
    ledger.set("dropped_in_a_row", 9)
    planner.plan()
    ledger.set("dropped_in_a_row", 10)
    with pytest.raises(RunError, match=r"10 groups in a row were dropped, enough for 5 batches.*penstock audit"):
        planner.plan()

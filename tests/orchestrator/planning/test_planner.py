import re
from collections import Counter
from typing import Any

import pytest
from support.ledgers import admitted, configured, pipeline_of, submitted

from headpond.batches import TrainerState
from headpond.errors import RunError
from headpond.ledger.states import GroupState, JobState, RolloutState
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.planning.phase import RunPhase
from headpond.orchestrator.planning.planner import AT_ONCE, Planner
from headpond.orchestrator.shutdown import StopRequests
from headpond.orchestrator.trainer import Trainer
from headpond.records.rollout import RolloutResult
from headpond.store import BlobRef


def planning(ledger: Ledger, *, examples: int = 1000, **settings: Any) -> Planner:
    """A planner with a surveyed environment. It does not wait for a trainer, unless `settings` change that."""
    config = configured(**{"trainer": {"max_steps_ahead": "unlimited"}} | settings)
    ledger.state.environments["noop"].examples = examples
    return Planner(config, ledger, Trainer(config, ledger), pipeline_of(config, ledger))


def out_of_data(ledger: Ledger, **settings: Any) -> str | None:
    return RunPhase(configured(**settings), ledger, StopRequests()).out_of_data


def plan_all(planner: Planner) -> None:
    while planner.plan():
        pass


def test_as_many_groups_begin_as_the_steps_need(ledger: Ledger) -> None:
    planner = planning(ledger)
    plan_all(planner)
    assert len(ledger.groups) == 6
    plan_all(planner)
    assert ledger.state.rollouts_planned == 24


def test_no_more_rollouts_are_in_flight_than_allowed(ledger: Ledger) -> None:
    planner = planning(ledger, rollouts={"max_in_flight": 10})
    plan_all(planner)
    assert ledger.ungenerated == 8


def test_a_large_plan_is_made_in_small_pieces(ledger: Ledger) -> None:
    planner = planning(ledger, steps=50, rollouts={"max_in_flight": 1000})
    assert planner.plan()
    assert ledger.state.rollouts_planned == AT_ONCE
    plan_all(planner)
    assert ledger.state.rollouts_planned == 400


def test_a_piece_holds_whole_groups(ledger: Ledger) -> None:
    planner = planning(ledger, rollouts={"group_size": 2 * AT_ONCE, "max_in_flight": 3000})
    assert planner.plan()
    assert ledger.state.groups_planned == 1
    plan_all(planner)
    assert ledger.state.groups_planned == 6


def test_a_group_that_was_dropped_is_replaced(ledger: Ledger) -> None:
    planner = planning(ledger)
    plan_all(planner)
    dropped = next(iter(ledger.groups.values()))
    for rollout in dropped.rollouts:
        ledger.move(rollout, RolloutState.FILTERED, reason="zero_variance")
    ledger.enter(dropped, GroupState.CLOSED)
    plan_all(planner)
    assert ledger.state.groups_planned == 7
    assert len(ledger.groups) == 6


def test_groups_of_an_open_step_are_not_counted_twice(ledger: Ledger) -> None:
    ledger.compose(0, [admitted(ledger), admitted(ledger)])
    plan_all(planning(ledger))
    assert ledger.state.groups_planned == 6


def test_a_batch_of_rollouts_replaces_what_partial_groups_lack(ledger: Ledger) -> None:
    planner = planning(ledger, steps=1, batch={"unit": "rollouts", "size": 8})
    admitted(ledger)
    partial = admitted(ledger)
    plan_all(planner)
    assert len(ledger.groups) == 2
    ledger.drop(partial.rollouts[0], "stale")
    plan_all(planner)
    assert len(ledger.groups) == 3


def test_a_batch_of_rollouts_is_planned_in_whole_groups(ledger: Ledger) -> None:
    plan_all(planning(ledger, steps=1, batch={"unit": "rollouts", "size": 9}))
    assert len(ledger.groups) == 3


def test_a_batch_of_tokens_is_planned_by_how_long_groups_have_been(ledger: Ledger) -> None:
    planner = planning(ledger, steps=1, batch={"unit": "tokens", "size": 900}, rollouts={"max_in_flight": 20})
    plan_all(planner)
    assert ledger.ungenerated == 20
    ledger.state.environments["noop"].groups_admitted = 10
    ledger.state.environments["noop"].tokens_admitted = 1000
    plan_all(planner)
    assert planner.groups_per_step() == 9
    assert len(ledger.groups) == 5


def test_a_step_larger_than_max_in_flight_is_filled(ledger: Ledger) -> None:
    """Groups that wait for their step are not in flight."""
    planner = planning(ledger, steps=1, batch={"size": 9}, rollouts={"max_in_flight": 4})
    for _ in range(8):
        admitted(ledger)
    plan_all(planner)
    assert len(ledger.groups) == 9


def test_oversampling_begins_more_than_the_steps_need(ledger: Ledger) -> None:
    plan_all(planning(ledger, rollouts={"oversample": 1.5}))
    assert len(ledger.groups) == 9


def test_every_epoch_plays_every_example_once_in_an_order_of_its_own(ledger: Ledger) -> None:
    plan_all(planning(ledger, examples=20, steps=20))
    epochs = [played(ledger)[:20], played(ledger)[20:]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 2
    assert epochs[0] != epochs[1]
    assert list(range(20)) not in epochs


def played(ledger: Ledger) -> list[int]:
    return [group.example for group in ledger.groups.values()]


def test_examples_are_played_in_order_if_the_setting_says_so(ledger: Ledger) -> None:
    plan_all(planning(ledger, examples=4, environments={"noop": {"use": "noop", "order": "in_order"}}))
    assert played(ledger) == [0, 1, 2, 3, 0, 1]


def test_an_epoch_keeps_the_order_that_it_began_with(ledger: Ledger) -> None:
    """With another sampler, the run was in the middle of an epoch."""
    ledger.state.environments["noop"].begun = 7
    plan_all(planning(ledger, examples=10, steps=6))
    assert played(ledger)[:3] == [7, 8, 9]
    assert played(ledger)[3:] != list(range(9))
    begun = len(ledger.groups)
    plan_all(planning(ledger, examples=10, steps=7, environments={"noop": {"use": "noop", "order": "in_order"}}))
    assert sorted(played(ledger)[3:13]) == list(range(10))
    assert played(ledger)[13:] == [0]
    assert begun == 12


def test_no_group_begins_after_the_last_epoch(ledger: Ledger) -> None:
    environments = {"noop": {"use": "noop", "epochs": 2}}
    planner = planning(ledger, examples=4, steps=10, environments=environments)
    plan_all(planner)
    assert sorted(played(ledger)) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert out_of_data(ledger, steps=10, environments=environments) is None
    for group in list(ledger.groups.values()):
        for rollout in group.rollouts:
            ledger.move(rollout, RolloutState.FILTERED, reason="zero_variance")
        ledger.enter(group, GroupState.CLOSED)
    plan_all(planner)
    assert not ledger.groups
    assert "after 0 of 10 steps: raise environments.NAME.epochs" in str(
        out_of_data(ledger, steps=10, environments=environments)
    )
    assert planning(ledger, examples=4, steps=10, environments={"noop": {"use": "noop", "epochs": 3}}).plan() is False
    assert len(ledger.groups) == 4


def test_environments_with_examples_left_take_the_place_of_those_without(ledger: Ledger) -> None:
    environments = {"few": {"use": "noop", "epochs": 1}, "noop": {"use": "noop"}}
    ledger.state.environments["few"].examples = 2
    planner = planning(ledger, steps=3, batch={"size": 4}, environments=environments)
    plan_all(planner)
    assert Counter(group.environment for group in ledger.groups.values()) == {"few": 2, "noop": 6}
    for group in [group for group in ledger.groups.values() if group.environment == "few"]:
        for rollout in group.rollouts:
            ledger.move(rollout, RolloutState.FILTERED, reason="zero_variance")
        ledger.enter(group, GroupState.CLOSED)
    plan_all(planner)
    assert Counter(group.environment for group in ledger.groups.values()) == {"noop": 12}
    assert out_of_data(ledger, steps=3, batch={"size": 4}, environments=environments) is None


def test_groups_are_begun_one_step_beyond_those_that_may_be_sealed(ledger: Ledger) -> None:
    plan_all(planning(ledger, steps=10, trainer={"max_steps_ahead": 1}))
    assert len(ledger.groups) == 2 * 3


def test_no_group_begins_before_its_environment_is_surveyed(ledger: Ledger) -> None:
    environments = {"maths": {"use": "noop", "weight": 3}, "games": {"use": "noop"}}
    planner = planning(ledger, batch={"size": 4}, environments=environments)
    planner._pipeline.survey.begin()
    planner._pipeline.survey.begin()
    assert [job.stage for job in ledger.jobs.values()] == ["survey"] * 2
    plan_all(planner)
    assert not ledger.groups
    ledger.state.environments["maths"].examples = 10
    plan_all(planner)
    assert [group.environment for group in ledger.groups.values()] == ["maths"] * 9


def test_a_batch_of_tokens_is_planned_by_the_lengths_of_each_environment(ledger: Ledger) -> None:
    environments = {"maths": {"use": "noop"}, "noop": {"use": "noop"}}
    planner = planning(ledger, steps=1, batch={"unit": "tokens", "size": 1000}, environments=environments)
    for name, tokens in (("maths", 500), ("noop", 50)):
        ledger.state.environments[name].examples = 10
        ledger.state.environments[name].groups_admitted = 1
        ledger.state.environments[name].tokens_admitted = tokens
    plan_all(planner)
    assert Counter(group.environment for group in ledger.groups.values()) == {"maths": 1, "noop": 10}


def test_a_run_that_drops_everything_stops_with_what_to_check(ledger: Ledger) -> None:
    planner = planning(ledger, batch={"max_empty_batches": 5})
    ledger.state.dropped_in_a_row = 9
    planner.plan()
    ledger.state.dropped_in_a_row = 10
    causes = planner._pipeline.causes
    causes.dropped("zero_variance", 36, [0.0] * 36)
    causes.dropped("overlong", 4, [0.5] * 4)
    with pytest.raises(RunError, match=r"10 groups .*overlong 4 \(mean reward 0.05, "):
        planner.plan()


def stored(ledger: Ledger, size: int) -> None:
    """A group whose four rollouts hold `size` bytes each."""
    group = submitted(ledger)
    for rollout in group.rollouts:
        ledger.end(ledger.jobs[rollout.id], JobState.SETTLED)
        blob = BlobRef(key=f"rollouts/{rollout.id}", size=size, checksum="")
        ledger.generated(rollout, RolloutResult(reward=0.0, columns=blob))
        ledger.move(rollout, RolloutState.ADMITTED)
    ledger.enter(group, GroupState.ADMITTED)


def test_a_full_store_stops_planning_until_a_step_is_released(ledger: Ledger) -> None:
    config = configured(trainer={"max_steps_ahead": "unlimited"}, max_store_gb=1.0)
    trainer = Trainer(config, ledger)
    ledger.state.environments["noop"].examples = 1000
    planner = Planner(config, ledger, trainer, pipeline_of(config, ledger))
    stored(ledger, 10**9 // 8)
    stored(ledger, 10**9 // 8)
    ledger.deliver(ledger.compose(0, list(ledger.groups.values())))
    plan_all(planner)
    assert ledger.groups == {}
    assert planner.troubles() == [], "the trainer's files were not read yet"
    trainer.state = TrainerState(acked=-1)
    assert re.search(r"1\.0 GB of 1 \(max_store_gb\).*step 0: .*reader\.ack\(step\)", str(planner.troubles()))
    ledger.state.delivered_bytes += -(10**9)
    assert planner.troubles() == []
    plan_all(planner)
    assert len(ledger.groups) == 4


def test_a_store_too_small_for_a_step_still_gets_that_step(ledger: Ledger) -> None:
    planner = planning(ledger, max_store_gb=0.1)
    stored(ledger, 10**9)
    plan_all(planner)
    assert len(ledger.groups) == 2
    assert planner.troubles() == []


def test_a_store_full_of_kept_columns_still_gets_the_next_step(ledger: Ledger) -> None:
    """The trainer has released every step; `trainer.keep_steps` keeps the columns until there are later ones."""
    config = configured(trainer={"max_steps_ahead": "unlimited", "keep_steps": 2}, max_store_gb=0.1)
    trainer = Trainer(config, ledger)
    trainer.state = TrainerState(acked=-1)
    planner = Planner(config, ledger, trainer, pipeline_of(config, ledger))
    ledger.state.environments["noop"].examples = 1000
    for _ in range(2):
        stored(ledger, 10**9 // 8)
    ledger.deliver(ledger.compose(0, list(ledger.groups.values())))
    plan_all(planner)
    assert (len(ledger.groups), planner.troubles() == []) == (0, False)
    trainer.state = TrainerState(acked=0, checkpointed=0)
    plan_all(planner)
    assert (len(ledger.groups), planner.troubles()) == (2, [])


def test_dropped_rollouts_do_not_count_as_stored(ledger: Ledger) -> None:
    stored(ledger, 100)
    (group,) = ledger.groups.values()
    ledger.drop(group.rollouts[0], "stale")
    assert ledger.state.open_bytes == 300
    assert ledger.unwanted_blobs == [f"rollouts/{group.id}-0"]


def test_the_ledger_counts_the_groups_that_a_stage_works_on(ledger: Ledger) -> None:
    """Planning reads these counts: with 20,000 open groups, counting them at every call took 20 s."""
    for state in ("filter", GroupState.ADMITTED, GroupState.CLOSED):
        ledger.enter(submitted(ledger), state)
    groups = [submitted(ledger), admitted(ledger)]
    assert ledger.unfinished == {"noop": 2}
    assert ledger.groups_in(GroupState.PLAYING) == groups[:1]
    assert len(ledger.groups_in(GroupState.ADMITTED, "filter")) == 3

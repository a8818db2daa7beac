import pytest
from support.ledgers import configured, generated

from headpond.orchestrator.endings.staleness import Staleness
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.records.rollout import RolloutResult


@pytest.mark.parametrize(("mode", "dropped"), [("drop", True), ("mask", False), ("monitor", False), ("off", False)])
def test_only_the_mode_drop_drops(ledger: Ledger, mode: str, dropped: bool) -> None:
    staleness = Staleness(configured(filters={"stale": {"mode": mode, "max_off_policy_steps": 2}}), ledger)
    ledger.state.policy_version = 5
    assert staleness.drops(2) is dropped
    assert not staleness.drops(3)


def test_a_rollout_is_judged_by_its_first_token(ledger: Ledger) -> None:
    staleness = Staleness(configured(filters={"stale": {"max_off_policy_steps": 2}}), ledger)
    ledger.state.policy_version = 5
    rollout = generated(ledger).rollouts[0]
    rollout.result = RolloutResult(reward=0.0, version_first=2, version_last=5)
    assert staleness.drops_rollout(rollout)
    rollout.result = RolloutResult(reward=0.0, version_first=-1)
    assert not staleness.drops_rollout(rollout), "nothing was generated"
    rollout.result = None
    assert not staleness.drops_rollout(rollout)


def test_what_the_engines_earlier_weights_sampled_is_dropped_when_the_trainer_begins_with_a_lower_number(
    ledger: Ledger,
) -> None:
    staleness = Staleness(configured(filters={"stale": {"mode": "off"}}), ledger)
    ledger.state.start_version = 20
    ledger.state.policy_version = 20
    assert not staleness.drops(20)
    ledger.state.policy_version = 0
    assert staleness.drops(20)
    assert not staleness.drops(0)
    ledger.state.steps_delivered = 20
    ledger.state.policy_version = 19
    assert not staleness.drops(20), "the trainer has loaded its own version 20 and not yet published it"

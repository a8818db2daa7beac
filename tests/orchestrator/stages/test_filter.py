"""What the run counts before a group is filtered."""

import math

from support.ledgers import configured, generated, pipeline_of

from headpond.orchestrator.ledger.ledger import Ledger


def test_the_sum_of_rewards_stays_a_number_that_the_ledger_can_keep(ledger: Ledger) -> None:
    """As JSON, an infinite sum is null: the resumed run could not add to it."""
    pipeline, environment = pipeline_of(configured(), ledger), ledger.state.environments["noop"]
    for reward in (1.5e308, -1.5e308):
        group = generated(ledger)
        for rollout in group.rollouts:
            ledger.score(rollout, reward)
        pipeline.advance(group)
        assert math.isfinite(environment.played_reward)
        assert "null" not in environment.content().partition("played_reward")[2].partition(",")[0]

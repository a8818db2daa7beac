"""What each replica gave and cost, as the workers' replies say."""

from support.ledgers import configured

from headpond.ledger.state_rows import ReplicaState
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.replica_costs import OTHER, ReplicaCosts, slow_tokens
from headpond.replica_use import ReplicaUse

A, B = "http://a:8000", "http://b:8000"


def costs_of(ledger: Ledger) -> ReplicaCosts:
    return ReplicaCosts(configured(engine={"urls": [A, B]}), ledger)


def test_uses_are_added_by_replica_and_kept_in_the_ledger(ledger: Ledger) -> None:
    costs = costs_of(ledger)
    costs.count({A: ReplicaUse(tokens=3_000, seconds=30.0)})
    costs.count({A: ReplicaUse(tokens=1_000, seconds=10.0), B: ReplicaUse(tokens=1_000, seconds=40.0, lost_tokens=70)})
    assert costs_of(ledger).status() == {
        A: {"tokens": 4_000, "tokens_per_s": 100.0, "lost_tokens": 0, "slow_tokens": 0},
        B: {"tokens": 1_000, "tokens_per_s": 25.0, "lost_tokens": 70, "slow_tokens": 3_000},
    }


def test_urls_that_the_run_does_not_know_are_counted_together(ledger: Ledger) -> None:
    for number in range(3):
        costs_of(ledger).count({f"http://10.0.0.{number}": ReplicaUse(tokens=5, lost_tokens=1)})
    other = ledger.state.replicas[OTHER]
    assert (other.tokens, other.lost_tokens) == (15, 3)
    assert list(ledger.state.replicas) == [OTHER]


def test_a_replica_is_not_compared_before_it_has_been_measured() -> None:
    measured = ReplicaState(tokens=50_000, seconds=100.0)
    assert slow_tokens({A: measured, B: ReplicaState(tokens=10, seconds=9.0)}) == {A: 0, B: 0}
    assert slow_tokens({A: measured}) == {A: 0}
    assert slow_tokens({}) == {}

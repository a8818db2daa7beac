import pytest
from support.ledgers import configured

from headpond.config import RunConfig
from headpond.errors import RunError
from headpond.orchestrator.examples.choice import Examples
from headpond.orchestrator.examples.poison import DEATHS_MOST, Poison
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import GroupRecord

DEATHS = 3


def config() -> RunConfig:
    environment = {"use": "noop", "order": "in_order"}
    return configured(environments={"noop": environment}, recovery={"max_example_deaths": DEATHS})


def group(example: int) -> GroupRecord:
    return GroupRecord(id="g0000001", ordinal=1, environment="noop", example=example)


def die(poison: Poison, ledger: Ledger, example: int, times: int, *, others: int = 1) -> None:
    for _ in range(times):
        poison.died(group(example), "no such image")
        ledger.state.rollouts_generated += others


def test_an_example_is_skipped_after_its_deaths_while_others_are_generated(ledger: Ledger) -> None:
    ledger.state.environments["noop"].examples = 4
    examples = Examples(config(), ledger)
    die(examples.poison, ledger, 2, DEATHS + 1)
    assert [examples.take("noop") for _ in range(6)] == [0, 1, 3, 0, 1, 3]
    (note,) = examples.poison.notes(["noop"])
    assert note.startswith("example 2 of noop is not played again until `headpond dead --retry`, because its rollouts")
    assert note.endswith("die: no such image")
    assert list(ledger.state.environments["noop"].quarantined) == [2]


def test_in_an_outage_nothing_is_quarantined(ledger: Ledger) -> None:
    poison = Poison(config(), ledger)
    for example in range(4):
        die(poison, ledger, example, 100, others=0)
    assert poison.notes(["noop"]) == []


@pytest.mark.parametrize("examples", [1, 4])
def test_deaths_in_several_outages_do_not_add_up(ledger: Ledger, examples: int) -> None:
    """In each one every example dies, some rollouts of each; between them others are generated."""
    poison = Poison(config(), ledger)
    for _ in range(DEATHS - 1):
        for example in range(examples):
            die(poison, ledger, example, DEATHS, others=0)
        ledger.state.rollouts_generated += 1_000
    assert poison.notes(["noop"]) == []


def test_two_poison_examples_are_found_although_they_die_at_the_same_time(ledger: Ledger) -> None:
    poison = Poison(config(), ledger)
    for number in range(4 * DEATHS):
        for example in ((0, 1), (1, 0))[number % 2]:
            poison.died(group(example), "no such image")
        ledger.state.rollouts_generated += 1
    assert len(poison.notes(["noop"])) == 2


def test_a_generated_rollout_ends_the_row_of_deaths(ledger: Ledger) -> None:
    poison = Poison(config(), ledger)
    for _ in range(10):
        die(poison, ledger, 0, DEATHS - 1)
        poison.generated(group(0))
    assert not ledger.state.environments["noop"].quarantined


def test_what_is_put_back_is_played_first_and_counts_from_zero(ledger: Ledger) -> None:
    ledger.state.environments["noop"].examples = 4
    examples = Examples(config(), ledger)
    die(examples.poison, ledger, 2, DEATHS + 1)
    examples.poison.play_again("noop", [2, 3, 2])
    assert [examples.take("noop") for _ in range(4)] == [2, 3, 0, 1]
    die(examples.poison, ledger, 2, DEATHS - 1)
    assert examples.take("noop") == 2


def test_a_run_whose_examples_are_all_in_quarantine_stops_and_says_what_to_do(ledger: Ledger) -> None:
    ledger.state.environments["noop"].examples = 2
    examples = Examples(config(), ledger)
    for example in range(2):
        die(examples.poison, ledger, example, DEATHS + 1)
    with pytest.raises(RunError, match=r"'noop' .*quarantine.*headpond dead --retry"):
        examples.take("noop")


def test_the_examples_whose_deaths_are_counted_are_bounded(ledger: Ledger) -> None:
    poison = Poison(config(), ledger)
    for example in range(2 * DEATHS_MOST):
        die(poison, ledger, example, 1)
    assert list(ledger.state.environments["noop"].deaths) == list(range(DEATHS_MOST, 2 * DEATHS_MOST))

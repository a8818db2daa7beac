import re

import pytest

from headpond.errors import RunError
from headpond.filters import FilterSettings
from headpond.orchestrator.endings.causes import ADVICE, FLAT_MOST, KINDS_MOST, RECENT, SAME_ERROR_MOST, Causes, masking

TOOL_CHOICE = 'the engine answered 400: "auto" tool choice requires --enable-auto-tool-choice (request {})'


def test_the_first_rollouts_that_all_die_of_one_error_stop_the_run() -> None:
    causes = Causes()
    for number in range(SAME_ERROR_MOST - 1):
        causes.died(TOOL_CHOICE.format(number))
    with pytest.raises(RunError, match=rf"first 32 rollouts died of the same error: the engine.* {ADVICE}$"):
        causes.died(TOOL_CHOICE.format("0xff"))


def test_deaths_after_a_success_or_of_several_errors_do_not_stop_it() -> None:
    succeeded, mixed = Causes(), Causes()
    succeeded.generated()
    mixed.died("another error")
    for _ in range(100):
        succeeded.died("one error")
        mixed.died("one error")
    assert re.match(r"Last error \(100 of 101\): one error\. ", mixed.explain())


def test_drops_are_named_by_reason_when_they_outnumber_deaths() -> None:
    causes = Causes()
    causes.died("one error")
    causes.dropped("zero_variance", 8, [0.0] * 8)
    equal = "Rollouts dropped by reason: zero_variance 8 (all with the reward 0). Relax that filter"
    assert causes.explain().startswith(equal)
    assert "(zero_variance 8; all with the reward 0): relax that filter" in str(causes.trouble)
    causes.dropped("zero_variance", 8, [1.0] * 8)
    assert "zero_variance 16 (mean reward 0.5, from 0 to 1). Relax" in causes.explain()
    causes.admitted()
    assert causes.explain().startswith("Rollouts dropped by reason: unknown (without a reward)")


def test_rollouts_that_were_cancelled_with_their_group_do_not_hide_the_error() -> None:
    causes = Causes()
    for number in range(20):
        causes.died(TOOL_CHOICE.format(number))
        causes.dropped("cancelled", 5)
        causes.dropped("group_too_small", 2)
    assert causes.explain().startswith("Last error (20 of 20): the engine answered 400")
    assert "20 of the last 20 rollouts died" in str(causes.trouble)


def test_the_number_of_errors_that_are_told_apart_is_bounded() -> None:
    causes = Causes()
    causes.generated()
    for number in range(10 * KINDS_MOST):
        causes.died("error " + "x" * number)
    assert "other errors" in causes.explain()


def test_the_last_endings_are_counted_by_cause_while_groups_are_admitted() -> None:
    causes = Causes()
    causes.generated()
    for number in range(4):
        causes.died(f"timed out after {number} s")
        causes.dropped("zero_variance", 8)
        causes.admitted(8)
    assert causes.recent() == {
        "rollouts": 68,
        "admitted": 32,
        "masked": {},
        "died": [{"error": "timed out after 3 s", "rollouts": 4}],
        "dropped": {"zero_variance": 32},
    }
    assert causes.trouble is None
    for _ in range(RECENT):
        causes.admitted(1)
    assert causes.recent() == {"rollouts": RECENT, "admitted": RECENT, "masked": {}, "died": [], "dropped": {}}


def test_losses_are_what_a_run_waits_for_when_they_are_most_of_what_ends() -> None:
    dying, dropping = Causes(), Causes()
    dying.admitted(4)
    dying.generated()
    for _ in range(5):
        dying.died("no answer")
    assert re.fullmatch("5 of the last 9 rollouts .*5 .*: no answer", dying.trouble or "")
    dropping.dropped("zero_variance", 4, [1.0] * 4)
    assert dropping.trouble is None, "too few to say"
    dropping.dropped("overlong", 4)
    assert re.search(r"8 rollouts .*\(zero_variance 4, overlong 4; .*reward 1\)", dropping.trouble or "")


def test_rollouts_that_were_masked_by_earlier_settings_blame_no_filter() -> None:
    causes, settings = Causes(), FilterSettings.model_validate({"overlong": {"mode": "monitor"}})
    causes.admitted(8, masked=8, masked_by=masking(settings, ["overlong"], group=False))
    assert (causes.untrained, causes.trouble) == (None, None)
    assert causes.recent()["masked"] == {"earlier settings": 8}


def test_masked_rollouts_are_kept() -> None:
    causes = Causes()
    causes.admitted(4, masked=4, masked_by="filters.overlong")
    causes.dropped("stale", 12)
    assert causes.trouble is None


def test_a_run_whose_rollouts_are_all_masked_trains_nothing() -> None:
    causes = Causes()
    causes.admitted(4, masked=4, masked_by="filters.overlong")
    assert causes.untrained is None, "too few to say"
    causes.admitted(4, masked=4, masked_by="filters.overlong")
    assert re.search(
        r'8 rollouts .*filters\.overlong.* filters\.overlong\.mode = "monitor".* policy\.sampling\.max_tokens',
        causes.untrained or "",
    )
    assert causes.trouble == causes.untrained
    assert causes.recent()["masked"] == {"filters.overlong": 8}
    causes.admitted(4, masked=3, masked_by="filters.overlong")
    assert (causes.untrained, causes.trouble) == (None, None)


def test_the_filters_that_mask_are_named_as_the_configuration_names_them() -> None:
    custom = {"mine": {"use": "a:b", "mode": "mask"}, "other": {"use": "a:c", "mode": "mask"}}
    settings = FilterSettings.model_validate({"custom": custom, "difficulty": {"mode": "mask"}})
    matched = {"overlong": 3, "mine": 1, "gibberish": 2}
    assert masking(settings, matched, group=False) == "filters.overlong, filters.custom.mine"
    assert masking(settings, matched, group=True) == "filters.difficulty"


def test_groups_whose_rewards_are_all_equal_are_noted() -> None:
    causes = Causes()
    for _ in range(FLAT_MOST):
        assert causes.notes == []
        causes.admitted(8, flat=True)
    assert causes.notes[0].startswith("nothing is learned: in each of the last 32 groups all rollouts have the same")
    assert causes.trouble is None, "the run does not wait for it"
    causes.admitted(8)
    assert causes.notes == []

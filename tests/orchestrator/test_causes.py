import pytest

from orchestrator.causes import ADVICE, KINDS_MOST, SAME_ERROR_MOST, Causes
from penstock.errors import RunError

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
    assert mixed.explain() == (
        "Last error (100 of 101): one error. Fix its cause, restart the workers if their code or settings changed, and "
        "run the same command again"
    )


def test_drops_are_named_by_reason_when_they_outnumber_deaths() -> None:
    causes = Causes()
    causes.died("one error")
    causes.dropped("zero_variance", 8)
    assert causes.explain().startswith("Rollouts dropped by reason: zero_variance 8. Relax that filter")
    causes.admitted()
    assert causes.explain().startswith("Rollouts dropped by reason: unknown")


def test_the_number_of_errors_that_are_told_apart_is_bounded() -> None:
    causes = Causes()
    causes.generated()
    for number in range(10 * KINDS_MOST):
        causes.died("error " + "x" * number)
    assert "other errors" in causes.explain()

"""Duties that fail while the run goes on."""

import pytest

from headpond.orchestrator.duties.housekeeping import Reported, Troubles


def attempt(duty: Reported, error: Exception | None = None) -> None:
    with duty:
        if error:
            raise error


def test_a_duty_that_fails_is_in_the_troubles_until_it_succeeds() -> None:
    troubles = Troubles()
    duty = Reported("write a file", "free space", troubles=troubles)
    attempt(duty, OSError("no space left"))
    assert troubles.texts() == ["cannot write a file (no space left): free space"]
    attempt(duty)
    assert not troubles.texts()


def test_a_duty_that_fails_every_other_time_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The disk is almost full."""
    duty = Reported("write a file")
    for _ in range(100):
        attempt(duty, OSError("no space left"))
        attempt(duty)
    assert caplog.text.count("action=duty_failed") == 1
    attempt(Reported("read a file"), OSError("gone"))
    assert caplog.text.count("action=duty_failed") == 2


def test_an_error_that_is_not_listed_passes() -> None:
    with pytest.raises(KeyError):
        attempt(Reported("write a file"), KeyError("a defect"))

import logging
import resource
from collections.abc import Iterator

import pytest

from headpond.processes import descriptors

WANTED = descriptors.BASE + 1000 * descriptors.PER_ROLLOUT


@pytest.fixture
def hard() -> Iterator[int]:
    """The hard limit; the soft limit is restored afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_thousand_rollouts_raise_a_low_limit(hard: int, caplog: pytest.LogCaptureFixture) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    assert descriptors.raise_limit(1000) == WANTED
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (WANTED, hard)
    assert not caplog.records


def test_a_sufficient_limit_is_not_changed(hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (WANTED + 1, hard))
    assert descriptors.raise_limit(1000) == WANTED + 1
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (WANTED + 1, hard)


def test_a_hard_limit_that_is_too_low_is_logged_with_advice(hard: int, caplog: pytest.LogCaptureFixture) -> None:
    rollouts = hard  # each needs more than one
    with caplog.at_level(logging.WARNING):
        assert descriptors.raise_limit(rollouts) == hard
    assert f"may_open={hard} wanted={descriptors.BASE + descriptors.PER_ROLLOUT * rollouts}" in caplog.text
    assert "ulimit" in caplog.text
    assert "lower -c" in caplog.text

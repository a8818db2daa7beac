import logging
import resource
from collections.abc import Iterator

import pytest

from penstock.runtime import descriptors

WANTED = descriptors.BASE + 1000 * descriptors.PER_ROLLOUT


@pytest.fixture
def hard() -> Iterator[int]:
    """The soft limit may be moved up to it, and is put back."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_thousand_rollouts_raise_a_low_limit(hard: int, caplog: pytest.LogCaptureFixture) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    assert descriptors.raise_limit(1000) == WANTED
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (WANTED, hard)
    assert not caplog.records


def test_a_limit_that_is_high_enough_stays(hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (WANTED + 1, hard))
    assert descriptors.raise_limit(1000) == WANTED + 1
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (WANTED + 1, hard)


def test_where_more_is_forbidden_it_says_what_to_do(hard: int, caplog: pytest.LogCaptureFixture) -> None:
    rollouts = hard  # of which each takes more than one
    with caplog.at_level(logging.WARNING):
        assert descriptors.raise_limit(rollouts) == hard
    assert f"may_open={hard} wanted={descriptors.BASE + descriptors.PER_ROLLOUT * rollouts}" in caplog.text
    assert "ulimit" in caplog.text
    assert "lower -c" in caplog.text

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headpond.config import Rollouts, RunConfig


@given(group_size=st.integers(1, 64), min_group_size=st.none() | st.integers(1, 100))
def test_the_smallest_group_kept_has_a_baseline(group_size: int, min_group_size: int | None) -> None:
    try:
        rollouts = Rollouts(group_size=group_size, min_group_size=min_group_size, max_in_flight=1000)
    except ValidationError:
        assert min_group_size is not None
        assert min_group_size > group_size
        return
    smallest = rollouts.smallest_group
    assert 1 <= smallest <= group_size
    if min_group_size is not None:
        assert smallest == min_group_size
    elif group_size > 1:
        assert smallest >= 2
        assert smallest >= group_size / 2


def test_ledger_and_store_are_in_the_run_directory_unless_set(tmp_path: Path) -> None:
    default = RunConfig(run_dir=tmp_path / "run")
    assert default.ledger_path == tmp_path / "run" / "ledger.sqlite"
    assert default.store_url == (tmp_path / "run" / "store").as_uri()
    moved = RunConfig(run_dir=tmp_path / "run", ledger_dir=tmp_path / "fast", store=f"file://{tmp_path}/shared")
    assert moved.ledger_path == tmp_path / "fast" / "ledger.sqlite"
    assert moved.store_url == (tmp_path / "shared").as_uri()


@pytest.mark.parametrize(
    ("mode", "renderer", "expected"),
    [(None, None, "open"), (None, "bytes-chatml", "linear"), ("open", "bytes-chatml", "open")],
)
def test_sessions_are_linear_when_they_render(mode: str | None, renderer: str | None, expected: str) -> None:
    settings = RunConfig.model_validate({"sessions": {"mode": mode}, "policy": {"renderer": renderer}})
    assert settings.session_mode == expected

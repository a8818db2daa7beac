import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.run_dirs import make_run

from headpond.commands.redone import Redo, parse_change
from headpond.errors import ConfigError, RunError

SETTINGS = {
    "rollouts.group_size": 3,
    "advantages.estimator": "grpo",
    "filters.gibberish.mode": "off",
    "batch.data_ranks": 2,
    "batch.seq_len": 64,
    "batch.pad_to_multiple_of": 8,
    "engine.logprobs_mode": "processed",
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Step 1 was made of one group; another was dropped meanwhile, of rewards that are all 0."""
    run = make_run(tmp_path / "run", settings=SETTINGS)
    with closing(sqlite3.connect(run.path / "ledger.sqlite")) as connection:
        connection.execute("UPDATE histories SET step = 1 WHERE grp = 1000")
        connection.commit()
    return run.path


def differences(run_dir: Path, *changes: str, step: int = 1) -> dict[str, tuple[Any, Any, Any]]:
    """Rollout -> dropped before, dropped now, why."""
    redone = Redo(run_dir, changes).step(step)
    return {one.rollout: (one.was.dropped, one.now.dropped, one.why) for one in redone.rollouts}


def test_a_group_that_a_filter_no_longer_drops_is_told_and_cannot_be_packed(run_dir: Path) -> None:
    found = differences(run_dir, "filters.zero_variance.mode=off")
    why = "zero_variance does not drop it any more; its tokens are deleted, so that it cannot be packed"
    assert [found[f"g0001000-{index}"] for index in range(3)] == [("zero_variance", None, why)] * 3
    assert Redo(run_dir, ["filters.zero_variance.mode=off"]).step(1).now.rollouts == 3


def test_a_filter_that_drops_now_is_named(run_dir: Path) -> None:
    redone = Redo(
        run_dir, ["filters.difficulty.mode=drop", "filters.difficulty.low=50", "filters.difficulty.high=99"]
    ).step(1)
    dropped = {one.rollout: one.why for one in redone.rollouts if one.group == "g0000002"}
    assert dropped == dict.fromkeys(dropped, "difficulty drops it")
    assert redone.now.rollouts == 0


def test_another_packing_has_other_files_of_the_same_rollouts(run_dir: Path) -> None:
    redone = Redo(run_dir, ["batch.seq_len=32"]).step(1)
    assert redone.now.micro_batches > redone.was.micro_batches
    assert redone.now.rollouts == redone.was.rollouts
    assert not redone.same_bytes


def test_the_store_and_the_ledger_stay_as_they_were(run_dir: Path) -> None:
    def files() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}

    before = files()
    Redo(run_dir, ["advantages.estimator=rloo"]).step(0)
    assert files() == before


def test_a_step_that_is_not_there_is_refused(run_dir: Path) -> None:
    with pytest.raises(RunError, match="step 7 has no manifest"):
        Redo(run_dir).step(7)


def test_a_step_whose_tokens_are_deleted_is_refused(run_dir: Path) -> None:
    for path in run_dir.rglob("g0000002-*/**/columns.safetensors"):
        path.unlink()
    with pytest.raises(RunError, match=r"step 1 .*trainer.keep_steps.*: 0, 1"):
        Redo(run_dir).step(1)


def test_changes_are_values_of_toml_or_text() -> None:
    assert parse_change("advantages.estimator=rloo") == ("advantages.estimator", "rloo")
    assert parse_change("batch.seq_len=32") == ("batch.seq_len", 32)
    assert parse_change('filters.overlong.mode="off"') == ("filters.overlong.mode", "off")
    for text in ("advantages.estimator", "engine.urls=x", "=3"):
        with pytest.raises(ConfigError, match="write setting=value"):
            parse_change(text)


def test_a_wrong_name_is_refused_with_the_nearest(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="rloo"):
        Redo(run_dir, ["advantages.estimator=rlooo"])

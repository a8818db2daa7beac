from pathlib import Path
from typing import Any

import pytest

from orchestrator import run_dir
from orchestrator.lock import lock_directory
from penstock.config import RunConfig
from penstock.errors import RunError, RunLocked, RunMismatch
from penstock.ledger.schema import open_for_writing


def opened(config: RunConfig) -> str:
    run_dir.create_directories(config)
    return run_dir.begin_or_resume(config)


def configured(tmp_path: Path, **settings: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"run_dir": tmp_path / "run", "environments": {"noop": {"use": "noop"}}, **settings}
    )


def test_run_json_keeps_the_id_and_names_ledger_and_store(tmp_path: Path) -> None:
    config = configured(tmp_path, redis_url="redis://ada:secret@redis.example:6379/3")
    run = opened(config)
    assert opened(config) == run
    assert run_dir.read(config.run_dir) == {
        "run": run,
        "identity": {
            "seed": 0,
            "environments": {"noop": {"use": "noop", "weight": 1.0, "options": {}}},
            "rollouts.group_size": 8,
            "batch.unit": "groups",
            "batch.size": 16,
            "batch.data_ranks": 1,
        },
        "redis": "redis://redis.example:6379/3",
        "ledger": "ledger.sqlite",
        "store": "store",
    }


def test_settings_that_may_change_between_starts_are_updated(tmp_path: Path) -> None:
    opened(configured(tmp_path))
    opened(configured(tmp_path, redis_url="redis://elsewhere:1/0", store=f"file://{tmp_path}/store", steps=99))
    kept = run_dir.read(tmp_path / "run")
    assert kept["redis"] == "redis://elsewhere:1/0"
    assert kept["store"] == f"{tmp_path}/store"


def test_a_run_may_be_moved(tmp_path: Path) -> None:
    config = configured(tmp_path)
    run = opened(config)
    open_for_writing(config.ledger_path).close()
    config.run_dir.rename(tmp_path / "moved")
    assert run_dir.ledger_path(tmp_path / "moved").exists()
    assert opened(configured(tmp_path, run_dir=tmp_path / "moved")) == run


def test_a_run_with_other_settings_is_refused_with_the_differences(tmp_path: Path) -> None:
    opened(configured(tmp_path))
    with pytest.raises(RunMismatch, match=r"seed was 0, now 1; batch.size was 16, now 32\): use another run_dir"):
        opened(configured(tmp_path, seed=1, batch={"size": 32}))
    opened(configured(tmp_path))


def test_a_second_ledger_is_refused(tmp_path: Path) -> None:
    config = configured(tmp_path)
    opened(config)
    open_for_writing(config.ledger_path).close()
    moved = configured(tmp_path, ledger_dir=tmp_path / "fast")
    with pytest.raises(RunMismatch, match="move it there, or set ledger_dir back"):
        opened(moved)
    config.ledger_path.rename(moved.ledger_path)
    opened(moved)
    assert run_dir.ledger_path(config.run_dir) == moved.ledger_path


def test_a_store_belongs_to_one_run(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    first = configured(tmp_path, store=store)
    run = opened(first)
    with pytest.raises(RunMismatch, match=rf"store {tmp_path}/store belongs to run {run}: set store to another"):
        opened(configured(tmp_path, run_dir=tmp_path / "second", store=store))
    assert opened(first) == run


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": "x"}', "null", '"run"'])
def test_a_damaged_run_json_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    config = configured(tmp_path)
    run_dir.create_directories(config)
    path = config.run_dir / "run.json"
    path.write_text(text)
    with pytest.raises(RunError, match=rf"{path} is damaged .*: restore it, or use another run_dir"):
        opened(config)
    assert path.read_text() == text


@pytest.mark.parametrize("setting", ["run_dir", "ledger_dir", "store"])
def test_a_directory_that_cannot_be_created_is_refused_with_its_setting(tmp_path: Path, setting: str) -> None:
    file = tmp_path / "file"
    file.write_text("")
    value = f"file://{file}/inside" if setting == "store" else str(file / "inside")
    with pytest.raises(RunError, match=rf"{file}/inside cannot be used \(Not a directory\): .* set {setting} to"):
        opened(configured(tmp_path, **{setting: value}))


def test_a_directory_without_run_json_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RunError, match="is not a run directory"):
            run_dir.read(path)


def test_the_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    with lock_directory(tmp_path), pytest.raises(RunLocked, match=r"is in use by process \d+ on .*: stop it"):
        lock_directory(tmp_path)
    lock_directory(tmp_path).close()


def test_a_lock_file_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(RunError, match="cannot be used"):
        lock_directory(tmp_path)

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from headpond.config import RunConfig
from headpond.config.declared import declarations, shared_settings
from headpond.errors import LedgerError, RunError, RunLocked, RunMismatch
from headpond.inspection import run_json
from headpond.ledger.schema import SCHEMA_VERSION, open_for_writing
from headpond.orchestrator import run_dir
from headpond.orchestrator.lock import lock_directory
from headpond.store.opening import read_run_store_url
from headpond.version import release


def opened(config: RunConfig) -> str:
    run_dir.create_directories(config)
    return run_dir.begin_or_resume(config)


def configured(tmp_path: Path, **settings: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"run_dir": tmp_path / "run", "environments": {"noop": {"use": "noop"}}, **settings}
    )


def test_run_json_keeps_the_id_and_names_ledger_and_store(tmp_path: Path) -> None:
    config = configured(tmp_path, redis_url="redis://ada:hush@redis.example:6379/3")
    run = opened(config)
    assert opened(config) == run
    settings = {setting.key: setting.value for setting in shared_settings(config)}
    assert run_json.read(config.run_dir) == {
        "run": run,
        "release": release(),
        "settings": settings,
        "changed": [],
        "redis": "redis://redis.example:6379/3",
        "ledger": "ledger.sqlite",
        "store": "store",
    }
    assert settings["environments.noop.use"] == "noop"
    assert "hush" not in (config.run_dir / "run.json").read_text()


def test_settings_that_may_change_between_starts_are_updated(tmp_path: Path) -> None:
    opened(configured(tmp_path))
    opened(configured(tmp_path, redis_url="redis://elsewhere:1/0", steps=99))
    kept = run_json.read(tmp_path / "run")
    assert kept["redis"] == "redis://elsewhere:1/0"
    assert kept["settings"]["steps"] == 99


def test_a_run_may_be_moved(tmp_path: Path) -> None:
    config = configured(tmp_path)
    run = opened(config)
    open_for_writing(config.ledger_path).close()
    config.run_dir.rename(tmp_path / "moved")
    assert run_json.ledger_path(tmp_path / "moved").exists()
    assert opened(configured(tmp_path, run_dir=tmp_path / "moved")) == run


def test_a_run_with_other_settings_is_refused_with_the_differences(tmp_path: Path) -> None:
    opened(configured(tmp_path))
    with pytest.raises(RunMismatch, match=r"batch.size was 16, now 32; seed was 0, now 1\).*run_dir"):
        opened(configured(tmp_path, seed=1, batch={"size": 32}))
    opened(configured(tmp_path))


OTHER_VALUES: dict[str, Any] = {
    "seed": {"seed": 1},
    "environments.noop.weight": {"environments": {"noop": {"use": "noop", "weight": 2.0}}},
    "environments.noop.options.x": {"environments": {"noop": {"use": "noop", "options": {"x": 1}}}},
    "environments.more.use": {"environments": {"noop": {"use": "noop"}, "more": {"use": "noop"}}},
    "rollouts.group_size": {"rollouts": {"group_size": 4}},
    "batch.unit": {"batch": {"unit": "rollouts"}},
    "batch.size": {"batch": {"size": 8}},
    "batch.data_ranks": {"batch": {"data_ranks": 2}},
}
"""Another value of each setting that is fixed for a run."""


def test_every_fixed_setting_is_tried_below() -> None:
    named = {re.sub(r"^environments\.\w+", "environments.NAME", key) for key in OTHER_VALUES}
    fixed = {key for key, declared in declarations(RunConfig) if declared.fixed}
    assert {key.removesuffix(".x") for key in named} == fixed


@pytest.mark.parametrize("key", OTHER_VALUES)
def test_a_fixed_setting_cannot_change(tmp_path: Path, key: str) -> None:
    config = configured(tmp_path)
    opened(config)
    before = (config.run_dir / "run.json").read_bytes()
    with pytest.raises(RunMismatch, match=re.escape(f"{key} was ")):
        opened(configured(tmp_path, **OTHER_VALUES[key]))
    assert (config.run_dir / "run.json").read_bytes() == before
    opened(config)
    assert run_json.read(config.run_dir)["changed"] == []


def test_what_changes_at_resume_takes_effect_and_is_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened(configured(tmp_path))
    assert not caplog.records
    again = configured(
        tmp_path,
        steps=99,
        sessions={"require_secret": True},
        advantages={"estimator": "rloo"},
        policy={"renderer": "bytes-chatml"},
    )
    opened(again)
    changed = run_json.read(again.run_dir)["changed"]
    assert [(each["setting"], each["was"], each["now"], each["restart"]) for each in changed] == [
        ("advantages.estimator", "dr_grpo", "rloo", ["compute"]),
        ("policy.renderer.backend", None, "bytes-chatml", ["rollouts", "sessions"]),
        ("sessions.require_secret", None, True, ["sessions"]),
        ("steps", 10, 99, []),
    ]
    assert "advantages.estimator was 'dr_grpo', now 'rloo': restart compute" in caplog.text
    opened(again)
    assert run_json.read(again.run_dir)["changed"] == changed


def test_a_second_ledger_is_refused(tmp_path: Path) -> None:
    config = configured(tmp_path)
    opened(config)
    open_for_writing(config.ledger_path).close()
    moved = configured(tmp_path, ledger_dir=tmp_path / "fast")
    with pytest.raises(RunMismatch, match="ledger_dir"):
        opened(moved)
    config.ledger_path.rename(moved.ledger_path)
    opened(moved)
    assert run_json.ledger_path(config.run_dir) == moved.ledger_path


def test_a_ledger_of_another_release_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    config = configured(tmp_path)
    opened(config)
    ledger = open_for_writing(config.ledger_path)
    ledger.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    ledger.close()
    (config.run_dir / "store" / "batches").mkdir()
    (config.run_dir / "store" / "batches" / ".manifest.json.unfinished").write_text("")
    before = {path: path.read_bytes() for path in config.run_dir.rglob("*") if path.is_file()}
    with pytest.raises(LedgerError, match=r"another version of Headpond \(schema \d+, not \d+\)"):
        opened(configured(tmp_path, steps=99))
    assert {path: path.read_bytes() for path in config.run_dir.rglob("*") if path.is_file()} == before


def test_a_second_store_is_refused(tmp_path: Path) -> None:
    config = configured(tmp_path)
    opened(config)
    moved = configured(tmp_path, store=f"file://{tmp_path}/large")
    with pytest.raises(RunMismatch, match=rf"file://{tmp_path}/large .*nothing"):
        opened(moved)
    shutil.rmtree(tmp_path / "large")
    (config.run_dir / "store").rename(tmp_path / "large")
    opened(moved)
    assert read_run_store_url(config.run_dir) == moved.store_url


def test_a_store_belongs_to_one_run(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    first = configured(tmp_path, store=store)
    run = opened(first)
    with pytest.raises(RunMismatch, match=rf"{tmp_path}/store .*{run}: set store "):
        opened(configured(tmp_path, run_dir=tmp_path / "second", store=store))
    assert not (tmp_path / "second" / "run.json").exists()
    assert opened(configured(tmp_path, run_dir=tmp_path / "second")) != run, "a refused start does not bind the run"
    before = (tmp_path / "second" / "run.json").read_bytes()
    with pytest.raises(RunMismatch, match="belongs to run"):
        opened(configured(tmp_path, run_dir=tmp_path / "second", store=store))
    assert (tmp_path / "second" / "run.json").read_bytes() == before
    assert opened(first) == run


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": "x"}', "null", '"run"'])
def test_a_damaged_run_json_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    config = configured(tmp_path)
    run_dir.create_directories(config)
    path = config.run_dir / "run.json"
    path.write_text(text)
    with pytest.raises(RunError, match=rf"{path} is damaged .*run_dir"):
        opened(config)
    assert path.read_text() == text


@pytest.mark.parametrize("setting", ["run_dir", "ledger_dir", "store"])
def test_a_directory_that_cannot_be_created_is_refused_with_its_setting(tmp_path: Path, setting: str) -> None:
    file = tmp_path / "file"
    file.write_text("")
    value = f"file://{file}/inside" if setting == "store" else str(file / "inside")
    with pytest.raises(RunError, match=rf"{file}/inside .*\(Not a directory\).* {setting} "):
        opened(configured(tmp_path, **{setting: value}))


def test_a_directory_without_run_json_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RunError, match="is not a run directory"):
            run_json.read(path)


def test_the_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    with lock_directory(tmp_path), pytest.raises(RunLocked, match=r"in use by process \d+ on "):
        lock_directory(tmp_path)
    lock_directory(tmp_path).close()


def test_a_lock_file_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(RunError, match="cannot be used"):
        lock_directory(tmp_path)


def test_a_stray_file_that_cannot_be_removed_does_not_stop_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured(tmp_path)
    run_dir.create_directories(config)
    (config.run_dir / ".status.json.1234.tmp").mkdir()
    assert run_dir.begin_or_resume(config)
    assert "action=duty_failed cannot remove incomplete files" in caplog.text


def test_a_store_that_cannot_be_used_is_named_with_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    url = f"sqlite_store:SqliteStore://{tmp_path}/never/blobs.sqlite"
    with pytest.raises(RunError, match=r"never/blobs\.sqlite .*unable to open.*set store"):
        run_dir.create_directories(RunConfig(run_dir=tmp_path / "run", store=url))


def test_a_store_without_the_protocol_is_named_with_method_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its exception is: an OSError would name a directory."""
    for kind in ("KeyError", "OSError"):
        module = tmp_path / f"bad_{kind.lower()}.py"
        base = "from headpond.store.memory import MemoryStore\nclass Bad(MemoryStore):\n    shared = True\n"
        module.write_text(f"{base}    def size(self, key):\n        raise {kind}('gone')\n")
        monkeypatch.syspath_prepend(tmp_path)
        url = f"{module.stem}:Bad://bucket"
        with pytest.raises(RunError) as refusal:
            run_dir.create_directories(RunConfig(run_dir=tmp_path / "run", store=url))
        message = str(refusal.value)
        assert message.startswith(f"the store URL {url} cannot be used (Bad.size of a missing key raised {kind}: ")
        assert f"({module}, line 5))" in message

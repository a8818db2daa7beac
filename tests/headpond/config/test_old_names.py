from pathlib import Path

import pytest
from typer.testing import CliRunner

from headpond import config
from headpond.commands.entry import main
from headpond.commands.main import app
from headpond.errors import ConfigError


def test_a_variable_of_penstock_is_refused_with_its_new_name() -> None:
    with pytest.raises(ConfigError, match=r"PENSTOCK_REDIS_URL: .* rename the variable to HEADPOND_REDIS_URL"):
        config.load(None, environ={"PENSTOCK_REDIS_URL": "redis://h"})


@pytest.mark.parametrize("arguments", [["status", "runs/x"], ["run"], ["demo"]])
def test_every_command_refuses_such_a_variable(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_STEPS", "3")
    monkeypatch.setattr("sys.argv", ["headpond", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "HEADPOND_STEPS" in capsys.readouterr().err


OLD = {
    "engine.weight_update": '[engine]\nweight_update = "penstock"',
    "environments.a.use": '[environments.a]\nuse = "penstock.environments.mine:Mine"',
    "store": 'store = "penstock.store.mine:Mine://x"',
}


@pytest.mark.parametrize("setting", OLD)
def test_a_setting_that_names_penstock_is_refused_with_file_and_setting(setting: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(OLD[setting])
    with pytest.raises(ConfigError) as refused:
        config.load(path, environ={})
    assert str(path) in str(refused.value)
    assert setting in str(refused.value)
    assert "headpond" in str(refused.value)


def test_a_project_or_a_directory_may_have_any_name(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('run_dir = "runs/penstock"\n[metrics]\nproject = "penstock"')
    assert config.load(path, environ={}).metrics.project == "penstock"


def test_the_help_has_no_old_name() -> None:
    assert "enstock" not in CliRunner().invoke(app, ["--help"]).output

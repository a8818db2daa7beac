from pathlib import Path

import pytest

from headpond.config import load
from headpond.config.problems import all_keys
from headpond.config.run import RunConfig
from headpond.config.test_hooks import SWITCH, HookedRunConfig, crash_at, noop_settings
from headpond.environments.loading import load_environments
from headpond.errors import ConfigError

HOOKS = "[noop]\nrollout_s = 2.0\n[testing]\ncrash_at = 'sealed'\n"


def test_hooks_are_accepted_with_the_switch(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(HOOKS)
    config = load(tmp_path / "run.toml", environ={SWITCH: "1", "HEADPOND_NOOP__STAGE_S": "3"})
    assert crash_at(config) == "sealed"
    settings = noop_settings(config, "noop")
    assert settings is not None
    assert (settings.rollout_s, settings.stage_s) == (2.0, 3.0)


@pytest.mark.parametrize("section", ["noop", "testing"])
def test_hooks_are_unknown_settings_without_the_switch(tmp_path: Path, section: str) -> None:
    (tmp_path / "run.toml").write_text(HOOKS)
    with pytest.raises(ConfigError, match=f"there is no setting '{section}'") as refusal:
        load(tmp_path / "run.toml", environ={})
    assert not {key.split(".")[0] for key in all_keys(RunConfig)} & {"noop", "testing"}
    assert SWITCH not in str(refusal.value)


def test_a_hook_in_a_variable_is_refused_without_the_switch() -> None:
    with pytest.raises(ConfigError, match="HEADPOND_TESTING__CRASH_AT is not a setting"):
        load(None, environ={"HEADPOND_TESTING__CRASH_AT": "sealed"})


def test_the_noop_environment_is_unknown_without_the_switch() -> None:
    config = load(None, environ={"HEADPOND_ENVIRONMENTS__NOOP__USE": "noop"})
    assert noop_settings(config, "noop") is None
    with pytest.raises(ConfigError, match="'noop' is not built in"):
        load_environments(config.environments)


def test_noop_stages_need_noop_environments_only() -> None:
    environments = {"a": {"use": "noop"}, "b": {"use": "noop"}, "sums": {"use": "arithmetic"}}
    config = HookedRunConfig.model_validate({"environments": environments})
    assert noop_settings(config, "a", "b") is config.noop
    assert noop_settings(config, "a", "sums") is None
    assert noop_settings(config, "missing") is None

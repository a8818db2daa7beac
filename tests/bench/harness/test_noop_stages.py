import pytest
from pydantic import ValidationError

from bench.harness.noop.stages import Noop, noop_settings, plays_noops
from headpond.config import RunConfig, load
from headpond.environments.loading import load_environments
from headpond.errors import ConfigError


def test_noop_bodies_play_noop_environments_only() -> None:
    environments = {"a": {"use": "noop"}, "b": {"use": "noop"}, "sums": {"use": "arithmetic"}}
    config = RunConfig.model_validate({"environments": environments, "evaluation": {"held_out": {"use": "noop"}}})
    assert plays_noops(config, ["a", "b", "held_out"])
    assert not plays_noops(config, ["a", "sums"])
    assert not plays_noops(config, ["missing"])


def test_variables_set_durations_and_faults() -> None:
    assert noop_settings({"NOOP_ROLLOUT_S": "2", "HOME": "/"}) == Noop(rollout_s=2.0)
    with pytest.raises(ValidationError, match="rolout_s"):
        noop_settings({"NOOP_ROLOUT_S": "2"})


def test_the_product_has_no_noop_environment() -> None:
    config = load(None, environ={"HEADPOND_ENVIRONMENTS__NOOP__USE": "noop"})
    with pytest.raises(ConfigError, match="'noop' is not built in"):
        load_environments(config.environments)

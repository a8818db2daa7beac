import math
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError
from support.advantages import recipe

from penstock.advantages import ESTIMATORS, AdvantageSettings
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdvantageSettings(completion_weight=-1.0), "advantages.completion_weight is -1.0"),
        (lambda: AdvantageSettings(tool_weight=math.nan), "advantages.tool_weight is nan"),
        (lambda: recipe(group_size=0), "group_size is 0"),
        (lambda: recipe("dr_gpo"), r"advantages.estimator = 'dr_gpo' is not known here; did you mean 'dr_grpo'\?"),
        (
            lambda: recipe(shaping="words"),
            "length_shaping = 'words' is not known here; .*none, tokens, turns",
        ),
        (lambda: recipe(estimators={"grpo": ESTIMATORS["rloo"]}), "advantages.estimator: grpo is built in"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_name(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_settings_can_be_part_of_a_pydantic_model() -> None:
    class Run(BaseModel):
        model_config = ConfigDict(extra="forbid")
        advantages: AdvantageSettings = AdvantageSettings()

    assert Run.model_validate({"advantages": {"estimator": "rloo"}}).advantages == AdvantageSettings(estimator="rloo")
    assert Run().advantages.estimator == "dr_grpo"
    with pytest.raises(ValidationError, match=r"advantages\.estmator"):
        Run.model_validate({"advantages": {"estmator": "rloo"}})

import math

import pytest
from pydantic import ValidationError
from support.advantages import recipe

from headpond.advantages import AdvantageSettings
from headpond.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "name", "message"),
    [
        (
            "estimator",
            "dr_gpo",
            r"'dr_gpo' is not built in; did you mean 'dr_grpo'\? built in are: dr_grpo, gdpo, grpo",
        ),
        (
            "length_shaping",
            "words",
            "'words' is not built in; built in are: linear, none, overlong, tokens, turns; name your",
        ),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(setting: str, name: str, message: str) -> None:
    with pytest.raises(ValidationError, match=rf"{setting}\n.*{message}"):
        AdvantageSettings.model_validate({setting: name})
    assert getattr(AdvantageSettings.model_validate({setting: "my_package:mine"}), setting) == "my_package:mine"


def test_a_group_has_at_least_one_rollout() -> None:
    with pytest.raises(ConfigError, match="group_size is 0"):
        recipe(group_size=0)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_is_a_finite_cost(weight: float) -> None:
    with pytest.raises(ValidationError, match="completion_weight"):
        AdvantageSettings(completion_weight=weight)

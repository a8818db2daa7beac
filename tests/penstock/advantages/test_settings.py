import math
from typing import Any

import pytest
from pydantic import ValidationError
from support.advantages import recipe

from penstock.advantages import ESTIMATORS, AdvantageSettings
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "message"),
    [
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


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_is_a_finite_cost(weight: float) -> None:
    with pytest.raises(ValidationError, match="completion_weight"):
        AdvantageSettings(completion_weight=weight)

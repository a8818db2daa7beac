"""The dialects of `engine.dialect`, and responses that mix the fields of vLLM and SGLang."""

from typing import get_args

import numpy as np
import pytest
from support.engine_responses import ResponseSpec, compact, routed
from support.reference_comparison import agree
from support.strict_reference import ReadInputs

from penstock.config.engine import Engine
from penstock.engines.dialects import DIALECTS

ROWS = np.arange(1, 9, dtype=np.uint8).reshape(2, 2, 2)


def test_every_dialect_of_the_configuration_has_a_class() -> None:
    assert set(get_args(Engine.model_fields["dialect"].annotation)) == DIALECTS.keys()


def test_meta_info_adds_version_and_routes_to_a_response_with_token_ids() -> None:
    response = ResponseSpec(prompt=[1, 2], completion=[3]).as_dict()
    response["choices"][0]["meta_info"] = {"weight_version": "5", "routed_experts": routed(ROWS, "object")}
    turn = agree(compact(response), ReadInputs(open_samples=[]))
    assert turn is not None
    assert turn.version == 5
    assert turn.routes is not None
    assert np.array_equal(turn.routes.rows, ROWS)


def test_routes_of_the_choice_precede_those_of_meta_info() -> None:
    response = ResponseSpec(prompt=[1, 2], completion=[3], dialect="sglang").as_dict()
    response["choices"][0]["routed_experts"] = routed(ROWS, "object")
    response["choices"][0]["meta_info"]["routed_experts"] = routed(ROWS + 1, "object")
    turn = agree(compact(response), ReadInputs(open_samples=[], prompt=[1, 2]))
    assert turn is not None
    assert turn.routes is not None
    assert np.array_equal(turn.routes.rows, ROWS)


@pytest.mark.parametrize("named", [True, False])
def test_generate_checks_token_names_also_with_meta_info(named: bool) -> None:
    response = ResponseSpec(prompt=[1, 2], completion=[3], dialect="generate").as_dict()
    response["choices"][0]["meta_info"] = {}
    if not named:
        response["choices"][0]["logprobs"]["content"][0]["token"] = "token_id:4"
    turn = agree(compact(response), ReadInputs(endpoint="generate", open_samples=[], prompt=[1, 2]))
    assert (turn is not None) == named


def test_generate_accepts_output_token_logprobs() -> None:
    sglang = ResponseSpec(prompt=[1, 2], completion=[3], dialect="sglang").as_dict()
    response = {"choices": [{"meta_info": sglang["choices"][0]["meta_info"]}]}
    turn = agree(compact(response), ReadInputs(endpoint="generate", open_samples=[], prompt=[1, 2]))
    assert turn is not None
    assert (turn.completion_ids.tolist(), turn.version, turn.message) == ([3], 7, None)

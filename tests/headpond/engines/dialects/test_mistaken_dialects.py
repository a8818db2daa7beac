"""A dialect of one's own that fails or returns other types: its class is named, not the engine or the environment."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from support.engine_clients import attempt_of, loaded, run, stage_of
from support.engine_responses import compact
from support.upstream import Response, serving, user

from headpond.config.engine import Engine
from headpond.engines.dialects import Dialect, Prompt, ResponseFields
from headpond.engines.responses.response import RequestInfo, read_turn
from headpond.environments.protocol import Policy
from headpond.errors import BadRequest, StageError, Upstream
from headpond.playing.rollout import play

PROMPT = Prompt(messages=[{"role": "user", "content": "one"}])
BODY = compact({"prompt": [1, 2, 3]})
RIGHT: dict[str, Any] = {
    "completion_ids": np.array([4, 5], np.int32),
    "completion_logprobs": np.array([-1.0, 0.0], np.float32),
    "prompt_ids": msgspec.Raw(b"[1,2,3]"),
    "message": b'{"role":"assistant","content":"x"}',
}


class Mine(Dialect):
    endpoint = "/mine"
    fields: Any = dict
    response: Any = dict

    def request_fields(self, prompt: Prompt, sampling: Mapping[str, Any]) -> dict[str, Any]:
        return self.fields()

    def read(self, text: bytes) -> ResponseFields:
        return self.response()


def mine(*, fields: Any = None, response: Any = None) -> Dialect:
    """With the functions that its methods call."""
    dialect = Mine(Engine())
    dialect.fields, dialect.response = fields, response
    return dialect


def failing() -> Any:
    return 1 + cast(Any, "one")


def refused(response: Callable[[], Any]) -> str:
    with pytest.raises(StageError) as refusal:
        read_turn(BODY, request=RequestInfo(dialect=mine(response=response)))
    return str(refusal.value)


def test_an_error_of_request_fields_names_the_dialect_and_its_line() -> None:
    with pytest.raises(StageError) as refusal:
        mine(fields=failing).request_body(PROMPT, {})
    message = str(refusal.value)
    assert message.startswith(f"the dialect {__name__}:Mine failed in request_fields: TypeError: unsupported operand")
    assert f"({__file__}, line " in message
    with pytest.raises(StageError, match="request_fields returned a list: return a dict"):
        mine(fields=list).request_body(PROMPT, {})


def test_a_value_that_json_does_not_have_is_the_callers() -> None:
    with pytest.raises(BadRequest, match="the request is not JSON-serializable"):
        mine(fields=lambda: {"stop": object()}).request_body(PROMPT, {})


def test_an_error_of_read_names_the_dialect_and_its_line() -> None:
    message = refused(failing)
    assert message.startswith(f"the dialect {__name__}:Mine failed in read: TypeError: unsupported operand")
    assert f"({__file__}, line " in message


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"prompt_ids": [1, 2, 3]}, "Mine.read returned prompt_ids of type list: return msgspec.Raw"),
        ({"routed_experts": None}, "Mine.read returned routed_experts of type NoneType: return msgspec.Raw"),
        ({"completion_ids": [4, 5]}, "Mine.read returned completion_ids of type list: return a numpy array of int32"),
        ({"completion_ids": np.array([4.0, 5.5])}, "Mine.read returned completion_ids of dtype float64: return int32"),
        ({"completion_logprobs": [0.0, 0.0]}, "returned completion_logprobs of type list: return a numpy array of"),
        ({"completion_logprobs": np.array(["a", "b"])}, "returned completion_logprobs of dtype <U1"),
        ({"message": {"role": "assistant"}}, "Mine.read returned message of type dict: return the message as JSON"),
        ({"version": "7"}, "Mine.read returned version of type str: return an int or None"),
        ({"finish_reason": 1}, "Mine.read returned finish_reason of type int"),
        ({"final": None}, "Mine.read returned final of type NoneType"),
    ],
)
def test_a_part_of_another_type_is_named_with_what_to_return(wrong: dict[str, Any], why: str) -> None:
    assert why in refused(lambda: ResponseFields(**{**RIGHT, **wrong}))


def test_another_result_than_response_fields_is_refused() -> None:
    assert "Mine.read returned a dict: return headpond.engines.dialects.ResponseFields" in refused(dict)


def test_what_json_cannot_decode_is_the_engines() -> None:
    def decode() -> Any:
        return msgspec.json.decode(b"{")

    for read in (decode, lambda: json.loads("{")):
        with pytest.raises(Upstream, match="the engine's response is malformed"):
            read_turn(BODY, request=RequestInfo(dialect=mine(response=read)))


class OneQuestion:
    examples = (0,)

    async def rollout(self, example: int, policy: Policy) -> float:
        await policy.chat([user("one")])
        return 1.0


def test_a_mistaken_dialect_is_not_retried(tmp_path: Path) -> None:
    """Nor is the environment named, although it awaits the chat."""
    with serving(lambda _: Response(body=BODY)) as server:

        async def main() -> None:
            async with stage_of(tmp_path, server.url, dialect=f"{__name__}:Mine") as stage:
                with pytest.raises(StageError, match=r"^Mine\.read returned a dict"):
                    await play(stage, loaded(OneQuestion()), 0, attempt_of())

        run(main)
        assert len(server.received) == 1

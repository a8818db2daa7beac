"""The dialects of `engine.dialect`: each reads the fields of its own server, and a wrong name is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from pydantic import ValidationError
from support.engine_responses import DIALECTS, ResponseSpec, compact, request_info, routed
from support.reference_comparison import agree
from support.strict_reference import ReadInputs

from headpond.config import engine
from headpond.config.engine import Engine
from headpond.engines.dialects import Dialect, Prompt, ResponseFields, dialect_of, load_dialect
from headpond.engines.responses.response import RequestInfo, read_turn
from headpond.errors import ConfigError, Upstream

ROWS = np.arange(1, 9, dtype=np.uint8).reshape(2, 2, 2)


def test_every_built_in_name_has_a_class() -> None:
    assert tuple(engine.DIALECTS) == DIALECTS
    kinds = [load_dialect(name) for name in engine.DIALECTS]
    assert len(set(kinds)) == len(kinds)
    assert all(issubclass(kind, Dialect) for kind in kinds)


def test_meta_info_is_ignored_in_a_response_of_vllm() -> None:
    response = ResponseSpec(prompt=[1, 2], completion=[3]).as_dict()
    response["choices"][0]["meta_info"] = {"weight_version": "5", "routed_experts": routed(ROWS, "object")}
    turn = agree(compact(response), ReadInputs(open_samples=[]))
    assert turn is not None
    assert (turn.version, turn.routes) == (None, None)


def test_routed_experts_of_the_choice_are_ignored_in_a_response_of_sglang() -> None:
    response = ResponseSpec(prompt=[1, 2], completion=[3], dialect="sglang").as_dict()
    response["choices"][0]["routed_experts"] = routed(ROWS, "object")
    response["choices"][0]["meta_info"]["routed_experts"] = routed(ROWS + 1, "object")
    turn = agree(compact(response), ReadInputs(dialect="sglang", open_samples=[], prompt=[1, 2]))
    assert turn is not None
    assert turn.routes is not None
    assert np.array_equal(turn.routes.rows, ROWS + 1)


@pytest.mark.parametrize("named", [True, False])
def test_generate_checks_token_names(named: bool) -> None:
    response = ResponseSpec(prompt=[1, 2], completion=[3], dialect="generate").as_dict()
    if not named:
        response["choices"][0]["logprobs"]["content"][0]["token"] = "token_id:4"
    turn = agree(compact(response), ReadInputs(dialect="generate", open_samples=[], prompt=[1, 2]))
    assert (turn is not None) == named


@pytest.mark.parametrize(("dialect", "other"), [("vllm", "sglang"), ("sglang", "vllm"), ("generate", "sglang")])
def test_a_response_of_another_server_is_refused_and_the_setting_named(dialect: str, other: str) -> None:
    body = ResponseSpec(prompt=[1, 2], completion=[3], dialect=other).body()
    with pytest.raises(Upstream, match=r"is engine\.dialect right\?"):
        read_turn(body, request=request_info(dialect, prompt_ids=np.array([1, 2], np.int32)))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("vlm", r"'vlm' is not known; did you mean 'vllm'\?"),
        ("openai", "built in: vllm, sglang, generate; or module:Class"),
        ("my package:Mine", "or module:Class"),
        (":Mine", "or module:Class"),
        ("mine:", "or module:Class"),
    ],
)
def test_an_unknown_name_is_refused_when_the_configuration_is_loaded(name: str, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Engine(dialect=name)


BROKEN = """
from headpond.engines.dialects import ChatDialect, Dialect

class NotADialect:
    pass

class Half(ChatDialect):
    def required_fields(self, prompt):
        return {}

class Nowhere(Dialect):
    def request_fields(self, prompt, sampling):
        return {}

    def read(self, text):
        raise NotImplementedError

class Picky(Nowhere):
    endpoint = "/x"

    def __init__(self, settings, *, renderer=None):
        raise RuntimeError("no licence")

class Forgetful(Nowhere):
    endpoint = "/x"

    def __init__(self, settings, *, renderer=None):
        pass

class OneText(Nowhere):
    endpoint = "/x"
    context_limit = "talk exceeds window"

class Loud(Nowhere):
    endpoint = "/x"
    context_limit = ("short", "Talk exceeds window")

class TextKey(Nowhere):
    endpoint = "/x"
    prompt_key = '"prompt":['

class NoSampling(Nowhere):
    endpoint = "/x"

    def request_fields(self, prompt):
        return {}

class Async(Nowhere):
    endpoint = "/x"

    async def read(self, text):
        raise NotImplementedError

class NotCallable(Nowhere):
    endpoint = "/x"
    read = 3
"""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere_to_be_found:Mine", "cannot be imported: No module named 'nowhere_to_be_found'; install it"),
        ("fails_to_import:Mine", "cannot be imported: ZeroDivisionError"),
        ("broken_dialects:Hal", "has no 'Hal'; did you mean 'Half'?"),
        ("broken_dialects:NotADialect", "is not a subclass of headpond.engines.dialects.Dialect"),
        ("broken_dialects:BROKEN", "is not a subclass"),
        ("broken_dialects:Half", "Half does not define read"),
        ("broken_dialects:Nowhere", "Nowhere.endpoint must be a path"),
        ("broken_dialects:Picky", "cannot be constructed: RuntimeError: no licence ("),
        ("broken_dialects:Forgetful", "Forgetful.__init__ must call super().__init__(settings, renderer=renderer)"),
        ("broken_dialects:OneText", "OneText.context_limit must be a tuple of lower-case texts: 'talk exceeds window'"),
        ("broken_dialects:Loud", "Loud.context_limit must be lower-case: write 'talk exceeds window'"),
        ("broken_dialects:TextKey", "TextKey.prompt_key must be bytes"),
        ("broken_dialects:NoSampling", "must be a function of (self, prompt, sampling)"),
        ("broken_dialects:Async", "Async.read must be a plain function, not async"),
        ("broken_dialects:NotCallable", "NotCallable.read is a int: it must be a function of (self, text)"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    (tmp_path / "broken_dialects.py").write_text(BROKEN + "\nBROKEN = 1\n")
    (tmp_path / "fails_to_import.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        dialect_of(Engine(dialect=name), place="headpond.toml, line 4")
    assert str(refusal.value).startswith(f"headpond.toml, line 4: engine.dialect = '{name}'")
    assert why in str(refusal.value)


class Careless(Dialect):
    """Decodes without types."""

    endpoint = "/careless"

    def request_fields(self, prompt: Prompt, sampling: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def read(self, text: bytes) -> ResponseFields:
        ids, logprobs, experts = json.loads(text)
        made = msgspec.Raw(json.dumps(experts).encode())
        return ResponseFields(
            completion_ids=np.array(ids), completion_logprobs=np.array(logprobs), routed_experts=made, message=b"{}"
        )


CARELESS = RequestInfo(dialect=Careless(Engine()), prompt_ids=np.array([1], np.int32))


@pytest.mark.parametrize(
    ("ids", "logprobs", "why"),
    [
        ([2, 3], [-1.0], "shape"),
        ([[2]], [[-1.0]], "shape"),
        ([2, -3], [-1.0, -1.0], "negative ids"),
        ([2, 2**32 + 3], [-1.0, -1.0], "ids above 2147483647"),
        ([2, 3], [-1.0, float("nan")], "not finite"),
        ([2, 3], [float("-inf"), -1.0], "not finite"),
        ([2, 3], [-1.0, 0.5], "above 0"),
    ],
)
def test_values_that_a_dialect_does_not_check_are_checked_after_it(ids: Any, logprobs: Any, why: str) -> None:
    with pytest.raises(Upstream, match=why):
        read_turn(json.dumps([ids, logprobs, None]).encode(), request=CARELESS)


def test_a_dialect_may_make_the_routed_experts_itself() -> None:
    body = json.dumps([[2, 3], [-1.0, 0.0], routed(ROWS, "object")]).encode()
    turn = read_turn(body, request=CARELESS)
    assert (turn.completion_ids.dtype, turn.completion_logprobs.dtype) == (np.int32, np.float32)
    assert turn.routes is not None
    assert np.array_equal(turn.routes.rows, ROWS)
    assert turn.routes_span is None

"""The table of malformed responses over HTTP: 502, nothing recorded, the next chat is answered."""

import json
from collections.abc import Iterator

import pytest
from support.malformed_responses import LAYERS, PROMPT, TABLE, TOPK, Malformed
from support.session_process import Script, SessionsProcess, running, scripted
from support.upstream import Response

Servers = dict[str, tuple[SessionsProcess, Script]]

CASES = [case for case in TABLE if case.dialect != "generate"]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    directory = tmp_path_factory.mktemp("sessions")
    with scripted() as vllm, scripted("sglang") as sglang:
        settings = {"engine__dialect": "sglang", "engine__hidden_layers": str(LAYERS)}
        settings |= {"engine__experts_per_token": str(TOPK), "engine__absent_routes": "mask"}
        with (
            running(directory, vllm.server.url) as one,
            running(directory, sglang.server.url, "--engine-routed-experts", store="other", **settings) as other,
        ):
            sglang.routed = False
            yield {"vllm": (one, vllm), "sglang": (other, sglang)}


def body_of(case: Malformed) -> bytes:
    """SGLang repeats the prompt's ids on request."""
    if case.dialect == "vllm":
        return case.body
    body = json.loads(case.body)
    body["choices"][0]["prompt_token_ids"] = PROMPT
    return json.dumps(body).encode()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.dialect}: {case.name}")
def test_a_malformed_response_is_502_and_records_nothing(servers: Servers, case: Malformed) -> None:
    server, script = servers[case.dialect]
    agent = server.agent()
    script.responses["malformed"] = lambda _: Response(body=body_of(case))
    response = agent.chat("malformed")
    assert response.status == 502
    assert case.message in response.error
    assert agent.turns() == 0
    assert agent.chat("are you there?").status == 200
    assert agent.turns() == 1


def test_the_table_has_at_least_120_cases() -> None:
    assert len(CASES) >= 120

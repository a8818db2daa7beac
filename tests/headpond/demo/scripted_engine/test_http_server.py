"""The server: its address, refusals, injected failures, and its stop."""

import http.client
import json
import signal
from contextlib import closing
from pathlib import Path
from select import select
from typing import Any

import pytest
from support.engine_process import CHAT, GENERATE, RECORDED_FIELDS, EngineProcess, running, user
from support.engine_responses import request_info

from headpond.engines.responses.response import read_turn
from headpond.errors import Upstream

HELLO = {"messages": [user("hi")]}


def test_health_and_models(engine: EngineProcess) -> None:
    assert engine.request("/health", method="GET") == (200, b"")
    status, body = engine.request("/v1/models", method="GET")
    assert status == 200
    assert json.loads(body)["data"][0]["id"] == "policy"


def test_it_listens_on_this_machine_only(engine: EngineProcess) -> None:
    host, port = engine.address
    sockets = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [local for local, _, state in sockets if state == "0A" and local.endswith(f":{port:04X}")]
    assert host == "127.0.0.1"
    assert listening == [f"0100007F:{port:04X}"]


@pytest.mark.parametrize(
    ("path", "request_", "why"),
    [
        (CHAT, b"{", "cannot be read"),
        (CHAT, b"[]", "cannot be read"),
        (CHAT, b'{"messages":[{"role":"user","content":"\xff"}]}', "cannot be read"),
        (CHAT, b"[" * 100_000, "cannot be read"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": ["hi"]}, "messages"),
        (CHAT, {"messages": [{"role": "robot"}]}, "role 'robot'"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
        (CHAT, HELLO | {"n": 2}, "n = 2"),
        (CHAT, HELLO | {"stream": True}, "stream"),
        (CHAT, HELLO | {"max_tokens": 0}, "max_tokens"),
        (CHAT, HELLO | {"routed_experts_prompt_start": 1000}, "from token 1000 on"),
        (CHAT, {"messages": [user("x" * 140_000)]}, "maximum context length is 131072"),
        (GENERATE, {"token_ids": [], "sampling_params": {}}, "token_ids"),
        (GENERATE, {"token_ids": [1, -1], "sampling_params": {}}, "token_ids"),
        (GENERATE, {"token_ids": [1, True], "sampling_params": {}}, "token_ids"),
        (GENERATE, {"token_ids": [1]}, "sampling_params"),
        ("/update_weight_version", {"new_version": 7}, "new_version"),
    ],
)
def test_a_bad_request_is_refused_with_the_reason(engine: EngineProcess, path: str, request_: Any, why: str) -> None:
    status, body = engine.request(path, request_)
    error = json.loads(body)["error"]
    assert (status, error["code"], error["type"]) == (400, 400, "BadRequestError")
    assert why in error["message"]


def test_unknown_paths_and_large_bodies_are_refused(engine: EngineProcess) -> None:
    assert engine.request("/v1/nothing", {})[0] == 404
    assert engine.request(CHAT, method="GET")[0] == 405
    status, body = engine.request(CHAT, b" " * (17 * 2**20))
    assert (status, json.loads(body)["error"]["type"]) == (413, "RequestTooLargeError")


def test_failures_are_repeatable_and_a_retry_may_succeed(tmp_path: Path) -> None:
    requests = [HELLO | {"seed": seed} for seed in range(40)]
    with running(tmp_path, "--failures", "error=0.5") as one, running(tmp_path, "--failures", "error=0.5") as other:
        statuses = [one.request(CHAT, request)[0] for request in requests]
        assert 8 < statuses.count(500) < 32
        assert set(statuses) == {200, 500}
        assert [other.request(CHAT, request)[0] for request in reversed(requests)] == statuses[::-1]
        again = [one.request(CHAT, request, X_Retry_Count="1")[0] for request in requests]
        assert again != statuses
        elsewhere = [one.request(CHAT, request, X_Session_ID="r1.2")[0] for request in requests]
        assert elsewhere != statuses


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_the_library_refuses_every_malformed_body(tmp_path: Path, dialect: str) -> None:
    with running(tmp_path, "--failures", "malformed=1", "--dialect", dialect) as engine:
        bodies = [engine.answer(CHAT, HELLO | RECORDED_FIELDS[dialect] | {"seed": seed}) for seed in range(20)]
    for body in bodies:
        with pytest.raises(Upstream):
            read_turn(body, request=request_info(dialect))
    assert any(body.startswith(b"<html>") for body in bodies)
    assert any(body.startswith(b"{") and body.endswith(b"}") for body in bodies), "JSON that is not a valid response"
    assert any(body.startswith(b"{") and not body.endswith(b"}") for body in bodies), "cut short"


def test_an_injected_disconnect_breaks_the_body(tmp_path: Path) -> None:
    with running(tmp_path, "--failures", "disconnect=1") as engine:
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            engine.request(CHAT, HELLO)
        assert engine.request("/health", method="GET")[0] == 200
        assert "Traceback" not in engine.text


def test_a_hanging_request_delays_neither_other_requests_nor_the_stop(tmp_path: Path) -> None:
    with running(tmp_path, "--failures", "hang=1") as engine, closing(engine.connect()) as hanging:
        hanging.request("POST", CHAT, json.dumps(HELLO))
        for _ in range(20):
            assert engine.request("/health", method="GET")[0] == 200
        assert select([hanging.sock], [], [], 0)[0] == []
        engine.signal(signal.SIGTERM)
        assert engine.wait(50) == 0  # by default, aiohttp waits 60 s for a request


def test_a_client_that_disconnects_is_not_an_error(tmp_path: Path) -> None:
    with running(tmp_path, "--layers", "48", "--length", "constant:8000") as engine:
        for _ in range(5):
            with closing(engine.connect()) as leaving:
                leaving.request("POST", CHAT, json.dumps(HELLO))
        assert engine.request(CHAT, HELLO)[0] == 200
        engine.signal(signal.SIGTERM)
        assert engine.wait() == 0
        assert "Traceback" not in engine.text
        assert "ERROR" not in engine.text


def test_a_wrong_setting_is_reported_in_one_line(tmp_path: Path) -> None:
    with running(tmp_path, "--latency", "normal:1") as engine:
        assert engine.wait() == 2
        assert engine.text.startswith("headpond: 'normal:1' is not a distribution")
        assert engine.text.count("\n") == 1


def test_a_taken_port_is_reported_with_the_option_to_change(engine: EngineProcess, tmp_path: Path) -> None:
    with running(tmp_path, "--port", str(engine.address[1])) as second:
        assert second.wait() == 2
        assert "choose another --port" in second.text.lower().partition("address already in use")[2]

import json
import re
import socket
from pathlib import Path

import pytest
from support.session_process import CHAT, Agent, Script, SessionsProcess
from support.stores import directory_store
from support.upstream import prompt_ids, user
from typer.testing import CliRunner

from headpond.commands.main import app
from headpond.errors import ConfigError
from headpond.store import BlobRef
from headpond.store.columns import read_columns

ID = re.compile("[0-9a-f]{32}")
HUGE = b" " * (17 << 20)


def test_health_names_the_process(sessions: SessionsProcess) -> None:
    first, second = (sessions.request("GET", "/health") for _ in range(2))
    assert (first.status, first.json["status"]) == (200, "ok")
    assert first.json.keys() == {"status", "session_server_instance_id"}
    assert ID.fullmatch(first.json["session_server_instance_id"])
    assert first.json == second.json


def test_a_session_has_a_url_of_its_own(sessions: SessionsProcess) -> None:
    one, other = sessions.agent(), sessions.agent(rollout="r1", attempt=3)
    assert ID.fullmatch(one.id)
    assert one.base_url == f"{sessions.url}/sessions/{one.id}/v1"
    assert len({one.id, other.id, one.secret, other.secret}) == 4
    shown = other.request("GET").json
    assert shown.keys() == {"session_id", "records", "metadata"}
    assert (shown["session_id"], shown["records"]) == (other.id, [])
    assert shown["metadata"]["accumulated_token_ids"] == []
    assert (shown["metadata"]["rollout"], shown["metadata"]["attempt"]) == ("r1", 3)


def test_a_record_holds_the_request_and_the_response(agent: Agent, script: Script) -> None:
    response = agent.talk("hello")
    assert response.content == "answer 1 to hello"
    shown = agent.request("GET").json
    (record,) = shown["records"]
    assert record.keys() == {"timestamp", "method", "path", "status_code", "request", "response"}
    assert (record["method"], record["path"], record["status_code"]) == ("POST", CHAT, 200)
    assert record["request"] == script.received("hello")[-1].body
    assert record["response"] == response.json
    assert shown["metadata"]["accumulated_token_ids"] == prompt_ids(agent.messages)[:-1]


def test_other_fields_and_defaults_reach_the_engine(sessions: SessionsProcess, script: Script) -> None:
    agent = sessions.agent(sampling={"temperature": 0.7, "top_p": 0.9, "max_tokens": 7})
    tools = [{"type": "function", "function": {"name": "add"}}]
    agent.chat("forced", logprobs=False, return_token_ids=False, top_p=1, tools=tools, stream_options={})
    sent = script.received("forced")[-1].body
    assert (sent["logprobs"], sent["return_token_ids"]) == (True, True)
    assert (sent["temperature"], sent["top_p"], sent["max_tokens"], sent["tools"]) == (0.7, 1, 7, tools)
    assert "stream_options" not in sent
    assert sent["model"] == "policy"
    agent.chat("named", model="adapter-1")
    assert script.received("named")[-1].body["model"] == "adapter-1"


def test_sealing_returns_the_files_of_the_rollout(sessions: SessionsProcess, script: Script) -> None:
    script.server.weights = "4"
    agent = sessions.agent(rollout="r7", attempt=2, sampling={"temperature": 0.5}, run="run", policy_version=4)
    agent.talk("one")
    agent.talk("two")
    sealed = agent.request("POST", "/seal")
    assert sealed.status == 200
    assert agent.request("POST", "/seal").json == sealed.json
    columns = read_columns(directory_store(sessions.store), BlobRef(**sealed.json["columns"]))
    assert (columns.rollout, columns.attempt, columns.turns.temperature.tolist()) == ("r7", 2, [0.5, 0.5])
    assert columns.input_ids.tolist() == prompt_ids(agent.messages)[:-1]
    assert sealed.json["sample_lengths"] == [columns.input_ids.size]
    assert (sealed.json["version_first"], sealed.json["version_last"], sealed.json["inexact_tokens"]) == (4, 4, 0)
    script.server.weights = None
    assert directory_store(sessions.store).open(BlobRef(**sealed.json["experts"])).size
    for response in (agent.chat("three"), agent.request("GET")):
        assert (response.status, response.error) == (404, f"session not found: session_id={agent.id}")
    assert agent.request("DELETE").status == 204
    assert directory_store(sessions.store).open(BlobRef(**sealed.json["columns"])).size, (
        "sealed files outlive their session"
    )


def test_a_failed_rollout_is_sealed_with_its_loss_masked(agent: Agent, sessions: SessionsProcess) -> None:
    agent.talk("one")
    sealed = agent.request("POST", "/seal", {"error": "out of time"}).json
    columns = read_columns(directory_store(sessions.store), BlobRef(**sealed["columns"]))
    assert (columns.error, columns.loss_mask.any()) == ("out of time", False)


def test_sealing_a_session_without_turns_is_refused(agent: Agent) -> None:
    response = agent.request("POST", "/seal")
    assert response.status == 422
    assert f"{agent.id} recorded no turn" in response.error
    agent.assert_usable()


def test_deleting_removes_the_session_and_its_files(agent: Agent, sessions: SessionsProcess) -> None:
    agent.talk("hello")
    files = next(sessions.store.rglob(agent.id))
    response = agent.request("DELETE")
    assert (response.status, response.body) == (204, b"")
    assert not files.exists()
    for method, path in [("GET", ""), ("DELETE", ""), ("POST", "/seal"), ("POST", CHAT), ("GET", "/v1/models")]:
        response = agent.request(method, path, {} if method == "POST" else None)
        assert (response.status, response.error) == (404, f"session not found: session_id={agent.id}")


@pytest.mark.parametrize(
    "path",
    ["/", "/v1/models", "/sessions/../sessions", "/sessions/" + "0" * 32, "/sessions/x/v1/models", "/health/", "/seal"],
)
def test_other_paths_are_not_found(sessions: SessionsProcess, path: str) -> None:
    assert sessions.request("GET", path).status == 404
    assert sessions.request("POST", path, {}).status == 404


@pytest.mark.parametrize(
    "path",
    ["/v1/embeddings", "/update_weights", "/flush_cache", "/sleep", "/v1/chat", "/v1/chat/completions/",
     "/v1/models/../../flush_cache", "/v1/models%2f..%2fsleep", "//v1/models", "/v1/models/x", "/generate", "/health"],
)  # fmt: skip
def test_an_agent_reaches_no_other_path_of_the_engine(agent: Agent, script: Script, path: str) -> None:
    before = len(script.server.received)
    for method in ("GET", "POST", "PUT", "DELETE"):
        assert agent.request(method, path, b"").status == 404
    assert {request.path for request in script.server.received[before:]} <= {"/v1/models"}


def test_models_are_read_from_the_engine(agent: Agent) -> None:
    assert agent.request("GET", "/v1/models?x=1").json == {"path": "/v1/models", "method": "GET"}
    assert agent.request("POST", "/v1/models", {}).status == 404


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "cannot be read"),
        (b"[]", "cannot be read"),
        ({"rollout": ""}, "rollout"),
        ({"rollout": 5}, "rollout"),
        ({"attempt": -1}, "attempt"),
        ({"attempt": True}, "attempt"),
        ({"sampling": []}, "sampling"),
        ({"sampling": {"n": 2}}, "sampling: n cannot be a default"),
        ({"key": "../../etc"}, "unknown field"),
        (b"\xff", "cannot be read"),
    ],
)
def test_an_invalid_session_request_is_refused(sessions: SessionsProcess, body: object, why: str) -> None:
    response = sessions.request("POST", "/sessions", body)
    assert response.status == 400
    assert why in response.error


def test_a_rollout_name_cannot_escape_the_store(sessions: SessionsProcess) -> None:
    agent = sessions.agent(rollout="../../../outside")
    agent.talk("hello")
    assert agent.request("POST", "/seal").status == 200
    assert {path.name for path in sessions.store.iterdir()} == {"sessions"}
    assert not list(sessions.store.parent.rglob("*outside*"))


def test_bodies_and_heads_are_limited(agent: Agent, sessions: SessionsProcess, script: Script) -> None:
    before = len(script.server.received)
    for path, limit in ((agent.path + CHAT, 1 << 24), ("/sessions", 1 << 18)):
        response = sessions.request("POST", path, HUGE)
        assert response.status == 413
        assert f"more than {limit} bytes" in response.error
    assert sessions.request("POST", "/sessions", {"sampling": {"x": "x" * (1 << 18)}}).status == 413
    response = sessions.request(
        "POST", agent.path + CHAT, b"", {"Transfer-Encoding": "identity", "X-Long": "x" * 20_000}
    )
    assert response.status == 431
    assert "head is too large" in response.error
    assert sessions.request("GET", "/" + "x" * 20_000).status == 431
    assert sessions.request("GET", "/health", None, {f"X-{number}": "x" for number in range(200)}).status == 431
    assert len(script.server.received) == before
    agent.assert_usable()


@pytest.mark.parametrize("field", ["audio", "functions", "function_call", "kv_transfer_params", "lora_path"])
def test_what_a_recording_cannot_honour_names_the_field(agent: Agent, script: Script, field: str) -> None:
    before = len(script.server.received)
    response = agent.chat("hello", **{field: {"x": "y"}})
    assert (response.status, response.error.startswith(f"{field} is not supported by a recording: ")) == (400, True)
    assert len(script.server.received) == before


def test_a_chunked_body_is_limited_while_it_is_received(agent: Agent, sessions: SessionsProcess) -> None:
    with socket.create_connection(sessions.address) as client:
        client.sendall(f"POST {agent.path}{CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        piece = b"%x\r\n%b\r\n" % (1 << 20, b" " * (1 << 20))
        for _ in range(17):
            client.sendall(piece)
        assert client.recv(1000).startswith(b"HTTP/1.1 413 ")
    agent.assert_usable()


def test_malformed_http_gets_400(sessions: SessionsProcess) -> None:
    with socket.create_connection(sessions.address) as client:
        client.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
        assert b" 400 " in client.recv(1000)


def test_expect_100_continue_is_supported(agent: Agent, sessions: SessionsProcess) -> None:
    body = json.dumps({"messages": [user("hello")]}).encode()
    with socket.create_connection(sessions.address) as client:
        head = f"POST {agent.path}{CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nExpect: 100-continue\r\n"
        client.sendall(head.encode() + b"\r\n")
        assert client.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_it_listens_on_this_machine_only(sessions: SessionsProcess) -> None:
    host, port = sessions.address
    sockets = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [local for local, _, state in sockets if state == "0A" and local.endswith(f":{port:04X}")]
    assert (host, listening) == ("127.0.0.1", [f"0100007F:{port:04X}"])


def test_the_status_shows_usage_and_limits(agent: Agent, sessions: SessionsProcess) -> None:
    before = sessions.status()
    agent.talk("hello")
    status = sessions.status()
    assert status["chats"]["recorded"] == before["chats"]["recorded"] + 1
    assert status["retained_bytes"] > before["retained_bytes"]
    assert status["sessions"]["open"] >= 1
    assert status["answers_bytes"]["used"] == status["requests_bytes"]["used"] == 0
    assert status["loop_lag"]["samples"] > 0
    agent.request("DELETE")
    assert sessions.status()["retained_bytes"] == before["retained_bytes"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--proxy-allow", "/v1/embeddings,/flush_cache"], "/flush_cache administers the engine"),
        (["--proxy-allow", "/v1/../sleep"], "is not a plain path"),
        (["--instance-id", "x"], "instance_id"),
        (["--host", "256.1.1.1"], "cannot listen on 256.1.1.1"),
        (["--store", "/plain/path"], "file:///absolute/path"),
        (["--engine-urls", "engine:8000"], "http://host:port"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_name(tmp_path: Path, arguments: list[str], why: str) -> None:
    defaults = ["--port", "0", "--engine-urls", "http://127.0.0.1:1", "--store", f"file://{tmp_path}"]
    result = CliRunner().invoke(app, ["sessions", *defaults, *arguments])
    assert isinstance(result.exception, ConfigError)
    assert why in str(result.exception)
    assert "\n" not in str(result.exception)

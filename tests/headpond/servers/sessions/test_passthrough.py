import gzip
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.conversations import LAYERS, TOPK, rows_of
from support.engine_responses import compact, routed
from support.session_process import Agent, HttpResponse, Script, SessionsProcess, running
from support.stores import directory_store
from support.upstream import ReceivedRequest, Response, answer, calling, content_ids, prompt_ids, tool_call, user

from headpond.store import BlobRef
from headpond.store.columns import read_columns
from headpond.store.experts import Experts

LONG = 'Grüße \\ "quoted" \U0001f600 ' * 100
"""Half a megabyte with its logprobs: read in a thread."""


def spaced(body: Any) -> bytes:
    return json.dumps(body, indent=1).encode()


def reordered(body: Any) -> bytes:
    """The routed experts come first, and their key occurs a second time in a field that is not read."""
    choice = body["choices"][0]
    choice = {"routed_experts": choice.pop("routed_experts"), **choice, "note": {"routed_experts": "not these"}}
    return compact({**body, "choices": [choice]})


def asked_for(body: Any, *, logprobs: bool = False, return_token_ids: bool = False) -> Any:
    """A response without what the client did not ask for."""
    (choice,) = body["choices"]
    for name in ("routed_experts", "indexer_topk", "note", *(() if return_token_ids else ("token_ids",))):
        choice.pop(name, None)
    choice["logprobs"] = choice["logprobs"] if logprobs else None
    left_out = {"kv_transfer_params", "prompt_logprobs", *(() if return_token_ids else ("prompt_token_ids",))}
    return {name: value for name, value in body.items() if name not in left_out}


SPELLINGS: dict[str, Callable[[Any], bytes]] = {"compact": compact, "spaced": spaced, "reordered": reordered}


@pytest.mark.parametrize("form", ["object", "npy"])
@pytest.mark.parametrize("text", ["short", LONG], ids=["short", "long"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_client_gets_what_it_asked_for_and_training_the_rest(
    agent: Agent, script: Script, form: str, text: str, spelling: str
) -> None:
    def respond(request: ReceivedRequest) -> Response:
        body = json.loads(answer(request, f"{text} {len(request.messages)}", routed=True))
        rows = rows_of([*body["prompt_token_ids"], *body["choices"][0]["token_ids"]])
        body["choices"][0]["routed_experts"] = routed(rows, form)
        body["choices"][0]["indexer_topk"] = [[7] * 1000]
        return Response(body=SPELLINGS[spelling](body))

    script.responses["fidelity"] = respond
    for asked in ({}, {"logprobs": True, "return_token_ids": True}):
        response = agent.talk("fidelity", **asked)
        assert response.json == asked_for(json.loads(respond(script.received("fidelity")[-1]).body), **asked)
    assert [record["response"] for record in agent.request("GET").json["records"]][-1] == response.json
    sealed = agent.request("POST", "/seal").json
    columns = read_columns(directory_store(agent.server.store), BlobRef(**sealed["columns"]))
    assert columns.input_ids.tolist() == prompt_ids(agent.messages)[:-1]
    experts = Experts(directory_store(agent.server.store), BlobRef(**sealed["experts"]))
    out = np.empty((columns.input_ids.size, LAYERS, TOPK), np.int32)
    experts.read(0, 0, len(out), out)
    np.testing.assert_array_equal(out[:-1], rows_of(columns.input_ids.tolist()))


def test_hop_by_hop_headers_of_the_engine_are_stripped(agent: Agent, script: Script) -> None:
    def respond(request: ReceivedRequest) -> Response:
        headers = {"Server": "vllm", "Date": "Thu, 01 Jan 1970 00:00:00 GMT", "X-Request-Id": "42", "Vary": "Origin"}
        headers |= {"Content-Type": "application/json; charset=utf-8", "Content-Encoding": "gzip", "X-Hop": "1"}
        headers |= {"Connection": "X-Hop"}
        return Response(body=gzip.compress(script.body(request)), chunked=True, headers=headers)

    script.responses["zipped"] = respond
    response = agent.chat("zipped")
    assert (response.status, response.content) == (200, "answer 1 to zipped")
    assert (response.all("x-request-id"), response.all("vary")) == (["42"], ["Origin"])
    assert response.all("content-type") == ["application/json; charset=utf-8"]
    assert response.all("content-length") == [str(len(response.body))]
    assert [response.all(name) for name in ("content-encoding", "transfer-encoding", "x-hop")] == [[], [], []]
    assert [len(response.all(name)) for name in ("server", "date")] == [1, 1]
    assert "vllm" not in response.all("server")
    assert "1970" not in response.all("date")[0]
    assert agent.turns() == 1


def test_the_engine_gets_the_clients_headers_without_the_secret(agent: Agent, script: Script) -> None:
    body = gzip.compress(json.dumps({"messages": [user("headers")]}).encode())
    headers = {"X_Trace": "7", "Accept": "text/plain", "Accept_Encoding": "gzip, br, zstd", "Content_Encoding": "gzip"}
    assert agent.request("POST", "/v1/chat/completions", body, **headers, Connection="X-Hop", X_Hop="1").status == 200
    request = script.received("headers")[-1]
    received = {name.lower(): value for name, value in request.headers.items()}
    assert (received["x-trace"], received["accept"], received["accept-encoding"]) == ("7", "text/plain", "identity")
    assert received["host"] == script.server.url.removeprefix("http://")
    assert received["x-session-id"] == f"{agent.id}.1"
    assert received["content-type"] == "application/json"
    assert not {"authorization", "content-encoding", "x-hop", "transfer-encoding"} & received.keys()
    assert int(received["content-length"]) == len(json.dumps(request.body, separators=(",", ":")))


@pytest.mark.parametrize(
    "headers",
    [
        "Authorization: Bearer\t{secret}",
        "Authorization: Bearer sk-other\r\nAuthorization: Bearer {secret}",
        "authorization: Basic {secret}",
        "X-Api-Key: {secret}",
        "Api-Key: {secret}",
        "Cookie: a=1; key={secret}",
    ],
)
@pytest.mark.parametrize("which", ["secret", "control_secret"])
def test_a_secret_reaches_the_engine_in_no_header(agent: Agent, script: Script, headers: str, which: str) -> None:
    secret = getattr(agent, which)
    body = json.dumps({"messages": [user("secret")]})
    head = f"POST {agent.path}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(agent.server.address) as client:
        client.sendall(f"{head}{headers.format(secret=secret)}\r\n\r\n{body}".encode())
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
    assert secret not in str(script.received("secret")[-1].headers)


def test_another_key_is_forwarded_to_the_engine(agent: Agent, script: Script) -> None:
    agent.request("POST", "/v1/chat/completions", {"messages": [user("key")]}, Authorization="Bearer sk-other")
    assert script.received("key")[-1].headers["Authorization"] == "Bearer sk-other"


@pytest.fixture(scope="module")
def guarded(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionsProcess]:
    """Listens on all addresses, with engine.api_key set."""
    directory = tmp_path_factory.mktemp("guarded")
    arguments = ["--host", "0.0.0.0", "--proxy-allow", "/v1/embeddings, /tokenize", "--instance-id", "ab" * 16]
    with running(directory, script.server.url, *arguments, engine__api_key="sk-ours") as process:
        yield process


def test_other_hosts_need_the_secret(guarded: SessionsProcess, script: Script) -> None:
    agent, other = guarded.agent(), guarded.agent()
    assert guarded.request("GET", "/health").json["session_server_instance_id"] == "ab" * 16
    wrong = [{}, {"Authorization": "Bearer "}, {"Authorization": agent.secret}, {"Authorization": "Basic x"}]
    wrong += [{"Authorization": f"Bearer {other.secret}"}, {"Authorization": f"Bearer {agent.secret}x"}]
    paths = [("GET", ""), ("DELETE", ""), ("POST", "/seal"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models")]
    for headers in wrong:
        for method, path in paths:
            response = guarded.request(method, agent.path + path, None, headers)
            assert response.status == 401
            assert "secret" in response.error
    assert agent.chat("with the secret").status == 200
    for headers in ({"Authorization": f"bearer\t{agent.secret}"}, {"Authorization": f"Bearer  {agent.secret} "}):
        assert guarded.request("GET", agent.path, None, headers).status == 200
    assert script.received("with the secret")[-1].headers["Authorization"] == "Bearer sk-ours"
    assert agent.secret not in guarded.text


def test_allowed_paths_are_proxied_unchanged(guarded: SessionsProcess, script: Script) -> None:
    agent = guarded.agent()
    response = agent.request("POST", "/v1/embeddings?a=%2F&b", {"input": "x"}, X_Own="1")
    assert response.json == {"path": "/v1/embeddings", "method": "POST"}
    request = script.server.received[-1]
    assert (request.body, request.headers["X-Own"], request.headers["Authorization"]) == (
        {"input": "x"},
        "1",
        "Bearer sk-ours",
    )
    assert agent.request("GET", "/tokenize").status == 200
    assert agent.request("GET", "/detokenize").status == 404
    assert agent.turns() == 0


def events(response: HttpResponse) -> list[Any]:
    assert response.all("content-type") == ["text/event-stream; charset=utf-8"]
    *chunks, end, rest = response.body.decode().split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def deltas(chunks: list[Any]) -> list[Any]:
    return [chunk["choices"][0]["delta"] for chunk in chunks]


def test_a_stream_has_content_end_and_usage_in_chunks_of_their_own(agent: Agent, script: Script) -> None:
    *chunks, usage = events(agent.chat("streamed", stream=True, stream_options={"include_usage": True}))
    request = script.received("streamed")[-1]
    assert not {"stream", "stream_options"} & request.body.keys()
    whole = json.loads(script.body(request))
    for chunk in (*chunks, usage):
        assert (chunk["object"], chunk["id"], chunk["model"]) == ("chat.completion.chunk", whole["id"], whole["model"])
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert deltas(chunks) == [{"role": "assistant", "content": ""}, {"content": "answer 1 to streamed"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert not any("usage" in chunk or "logprobs" in chunk["choices"][0] for chunk in chunks)
    chunks = events(agent.chat("streamed", stream=True, logprobs=True))
    assert chunks[1]["choices"][0]["logprobs"] == whole["choices"][0]["logprobs"]
    assert not any("usage" in chunk for chunk in chunks), "not asked for"
    records = agent.request("GET").json["records"]
    assert len(records) == 2
    assert records[0]["response"]["choices"][0]["message"] == whole["choices"][0]["message"]


def test_each_streamed_tool_call_is_a_chunk_with_its_index(agent: Agent, script: Script) -> None:
    calls = [tool_call("add", {"a": 1}, id="c1"), tool_call("add", {"a": 2}, id="c2")]
    message = calling(*calls) | {"reasoning": "two sums"}
    script.responses["call"] = lambda request: Response(body=answer(request, message))
    streamed = [{"index": 0, **calls[0]}, {"index": 1, **calls[1]}]
    assert deltas(events(agent.chat("call", stream=True))) == [
        {"role": "assistant", "content": None},
        {"reasoning": "two sums"},
        *({"tool_calls": [call]} for call in streamed),
        {},
    ]
    result = {"role": "tool", "tool_call_id": "c1", "content": "2"}
    assert agent.chat([user("call"), calling(*streamed), result]).status == 200
    sealed = agent.request("POST", "/seal").json
    recorded = prompt_ids([user("call"), message, result])
    assert sealed["sample_lengths"] == [len(recorded) + len(content_ids({"content": "answer 3 to 2"}))]


def test_large_responses_are_read_in_a_thread_and_not_kept(agent: Agent, script: Script) -> None:
    def respond(request: ReceivedRequest) -> Response:
        body = json.loads(answer(request, "large"))
        tokens = len(body["prompt_token_ids"]) + len(body["choices"][0]["token_ids"])
        rows = np.full((tokens - 1, 100, 1000), 7, np.uint8)
        body["choices"][0]["routed_experts"] = routed(rows, "object")
        return Response(body=compact(body))

    script.responses["many rows"] = respond
    response = agent.talk("many rows")
    assert len(respond(script.received("many rows")[-1]).body) > 2_000_000 > 1000 * len(response.body)
    assert agent.server.status()["retained_bytes"] < 1_000_000
    assert agent.request("POST", "/seal").json["experts"]["size"] > 1_500_000

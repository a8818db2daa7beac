"""Thousands of malformed requests by an agent: each is refused with 4xx, and none reaches another session or path."""

import gzip
import json
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.engine_responses import ResponseSpec, compact
from support.raw_server import http_response, raw_server
from support.session_process import CHAT, Agent, SessionsProcess, running
from support.tokenizer_directory import tokenizer_dir
from support.waiting import HANG_S

REQUESTS_A_ROUND = 25
"""With a session of its own. 100,000 requests in `make fuzz`."""
MARKER = "words of another session"
SPEC = ResponseSpec(prompt=[1, 2], completion=[3], content="ok")
ANSWER = http_response(compact(SPEC.as_dict()))
TOKENS = http_response(
    compact(
        {key: value for key, value in replace(SPEC, dialect="generate").as_dict().items() if key != "prompt_token_ids"}
    )
)
METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "CONNECT", "TRACE", "get", "P\x00ST", "É", ""]
ALLOWED = {
    b"POST /v1/chat/completions",
    b"POST /inference/v1/generate",
    b"GET /v1/models",
    b"POST /tokenize",
    b"GET /metrics",
}  # the last two by itself
SCALARS: list[Any] = [None, True, 0, -1, 1e308, 2**70, "", "x", "\u2028", "\x00", "é" * 9, "../..", [], {}, [[]], [{}]]
NAMES = ["messages", "role", "content", "tool_calls", "tools", "n", "stream", "stream_options", "model", "logprobs"]
NAMES += ["temperature", "max_tokens", "stop", "seed", "sampling_params", "token_ids", "input_ids", "rid", "priority"]
NAMES += ["chat_template_kwargs", "return_token_ids", "include_reasoning", "rollout", "attempt", "run", "error"]
NAMES += ["system", "instructions", "previous_response_id", "tool_choice", "include", "type", "text", "prompt", "name"]
NAMES += ["output_config", "stop_sequences", "metadata", "function", "arguments", "call_id", "output", "forced"]
HEADER_NAMES = ["Host", "Content-Length", "Transfer-Encoding", "Content-Encoding", "Expect", "Connection", "Upgrade"]
HEADER_NAMES += ["Authorization", "X-Api-Key", "Cookie", "X-Session-ID", "X-Retry-Count", "Range", "Content-Type"]
HEADER_NAMES += ["Idempotency-Key", "x-stainless-retry-count", "thread-id", "Accept", "TE", "Trailer", "X\x7f", "", " "]
HEADER_NAMES += ["x-headpond-train", "x-claude-code-agent-id", "X-Request-Id"]
HEADER_VALUES = [
    "",
    " ",
    "0",
    "-1",
    "9" * 30,
    "chunked",
    "gzip",
    "br",
    "100-continue",
    "close",
    "keep-alive",
    "upgrade",
]
HEADER_VALUES += ["x" * 9000, "\xff\xfe", "a\tb", "a\r\n b", "a\x00b", "Bearer", "Basic eDp5", "bytes=0-1", "*/*;q=x"]


APIS = [CHAT] * 6 + ["/v1/messages", "/v1/responses", "/v1/completions", "/v1/messages/count_tokens"]
OF_CHATS = ["Idempotency-Key", "x-stainless-retry-count", "thread-id", "x-claude-code-agent-id", "x-headpond-train"]
PLAIN_VALUES = ["", "0", "1", "-1", "x", "true", "9" * 30, "x" * 900]
BODIES = 0.6
"""Share of the requests that are spoiled in their body only."""
RULES = """
[policy]
max_turns = 1000
[sessions.leave_out.titles]
user = "^extra"
[sessions.leave_out.small]
model = "^x"
system = "x"
"""


class Fuzz:
    def __init__(self, seed: int, agent: Agent, victim: Agent) -> None:
        self.random = random.Random(seed)
        self.agent, self.victim = agent, victim

    def request(self) -> tuple[bytes, bool]:
        """A request, and whether it is certainly complete: a response to it can be awaited. Most are spoiled in their
        body only: a spoiled path or head ends before a body is looked at."""
        return self.chat_request() if self.random.random() < BODIES else self.any_request()

    def chat_request(self) -> tuple[bytes, bool]:
        choose = self.random.choice
        path, body = self.agent.path + choose(["", "", "/branch/a"]) + choose(APIS), self.chat()
        more = choose([[], [], ["x-headpond-train: false"], [f"{choose(OF_CHATS)}: {choose(PLAIN_VALUES)}"]])
        lines = [f"POST {path} HTTP/1.1", "Host: x", f"x-api-key: {self.agent.secret}", *more]
        return "\r\n".join([*lines, f"Content-Length: {len(body)}"]).encode() + b"\r\n\r\n" + body, True

    def any_request(self) -> tuple[bytes, bool]:
        choose = self.random.choice
        body = choose([self.chat, self.chat, self.new_session, self.noise])()
        complete = self.random.random() < 0.97
        headers = [f"Authorization: Bearer {choose([self.agent.secret] * 8 + ['x', ''])}"]
        if self.random.random() < 0.5:
            name, value = choose(HEADER_NAMES), choose(HEADER_VALUES)
            complete = complete and name.lower() not in ("content-length", "transfer-encoding", "expect", "upgrade")
            headers.append(f"{name}: {value}")
        if self.random.random() < 0.05:
            body = gzip.compress(body)
            headers.append("Content-Encoding: gzip")
        length = len(body) if complete else self.random.randrange(2 * len(body) + 2)
        target = choose(["POST"] * 12 + METHODS) + " " + self.target()
        head = "\r\n".join([f"{target} HTTP/1.1", "Host: x", *headers, f"Content-Length: {length}"])
        return head.encode("latin-1", "replace") + b"\r\n\r\n" + body, complete

    def target(self) -> str:
        choose = self.random.choice
        session = choose(
            [self.agent.path] * 6 + [self.victim.path, "/sessions/" + "0" * 32, "/sessions/..", "/sessions"]
        )
        others = ["", "/seal", "/rewards", "/v1/models", "/v1/models/x", "/v1", "/update_weights", "/x" * 50]
        rest = choose(["", "", "", "/branch/a"]) + choose([*APIS, *others])
        return self.altered(session + rest) + choose(["", "", "?", "?a=%2F", "?" + "&" * 99, "#x"])

    def altered(self, path: str) -> str:
        tricks: list[Callable[[str], str]] = [
            lambda path: path.replace("/v1", "/v1/../.."),
            lambda path: path.replace("/", "%2f"),
            lambda path: path.replace("/", "//"),
            lambda path: path + "/..%00",
            lambda path: path + "/../../" + self.victim.id,
            lambda path: f"http://elsewhere{path}",
            lambda path: path.replace("sessions", "s\xe9ssions"),
            lambda path: path[: self.random.randrange(len(path) + 1)],
            lambda path: path.upper(),
            lambda path: path + "%zz",
            lambda path: path + "\\..\\",
            lambda _: self.random.choice(
                ["*", "", "http://", "//", "/" * 200, "/health", "/status", "x:y@z", "http://[::1"]
            ),
        ]
        return self.random.choice(tricks)(path) if self.random.random() < 0.4 else path

    def chat(self) -> bytes:
        message: dict[str, Any] = {"role": "user", "content": self.random.choice(["hello", "extra"])}
        names = ["messages", "messages", "input", "prompt"]
        body: dict[str, Any] = {self.random.choice(names): [message], "model": "policy"}
        for _ in range(self.random.randrange(3)):
            self.random.choice([message, body])[self.random.choice(NAMES)] = self.value()
        return self.spoiled(json.dumps(body))

    def new_session(self) -> bytes:
        return self.spoiled(json.dumps({self.random.choice(NAMES): self.value(), "rollout": self.value()}))

    def noise(self) -> bytes:
        return self.random.choice([b"", b"null", b"[]", b"{", b"\xff", b'"', b"[" * 2000, self.random.randbytes(50)])

    def value(self, depth: int = 0) -> Any:
        choose = self.random.choice
        match self.random.randrange(6 if depth < 3 else 3):
            case 3:
                return [self.value(depth + 1) for _ in range(self.random.randrange(3))]
            case 4:
                return {choose(NAMES): self.value(depth + 1) for _ in range(self.random.randrange(3))}
            case 5:
                levels = choose([50, 90, 150, 300])
                return json.loads("[" * levels + "]" * levels)
            case _:
                return choose(SCALARS)

    def spoiled(self, text: str) -> bytes:
        body = bytearray(text.encode())
        if self.random.random() < 0.2:
            body[self.random.randrange(len(body))] = self.random.randrange(256)
        return bytes(body)


def exchange(server: SessionsProcess, request: bytes, *, complete: bool) -> bytes:
    """What the server sends until it closes the connection; nothing if it may be waiting for more."""
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    received = bytearray()
    with socket.create_connection(server.address, timeout=HANG_S) as client, suppress(OSError):
        client.sendall(request + last)
        while complete and (part := client.recv(1 << 16)):
            received += part
    return bytes(received)


@pytest.mark.parametrize("renderer", ["", "bytes-chatml", "a tokenizer"])
def test_malformed_requests_get_4xx_and_nothing_of_another_session(
    tmp_path: Path, fuzz_rounds: int, renderer: str
) -> None:
    settings = {"sessions__max_sessions": "1000000", "engine__versions": "announced"}
    (tmp_path / "run.toml").write_text(RULES)
    arguments = [str(tmp_path / "run.toml"), "--require-secret"]
    if renderer:
        settings["engine__dialect"] = "generate"
        name = str(tokenizer_dir(tmp_path / "tokenizer")) if renderer == "a tokenizer" else renderer
        arguments += ["--policy-renderer", name, "--mode", "open"]
    response = TOKENS if renderer else ANSWER
    with (
        raw_server(lambda connection, *_: connection.sendall(response)) as engine,
        running(tmp_path, engine.url, *arguments, **settings) as server,
    ):
        victim = server.agent()
        victim.talk(MARKER)
        requests = 0
        for number in range(fuzz_rounds // (8 if renderer else 1)):
            fuzz = Fuzz(number, server.agent(), victim)
            for _ in range(REQUESTS_A_ROUND):
                request, complete = fuzz.request()
                received = exchange(server, request, complete=complete)
                assert received or not complete, (number, request)
                assert not received.startswith(b"HTTP/1.1 5"), (number, request, received)
                assert MARKER.encode() not in received, (number, request, received)
                assert victim.secret.encode() not in received
                requests += 1
        refused, chats = server.status()["refused"], server.status()["chats"]
        assert chats["begun"] > requests * BODIES / 2, "most bodies were looked at"
        assert min(chats["recorded"], chats["left_out"]) > requests / 100, chats
        assert not [status for status in refused if status.startswith("5")], refused
        assert {"400", "401", "404"} <= refused.keys()
        assert "action=unexpected" not in server.text
        assert victim.turns() == 1
        victim.assert_usable()
    assert {target.partition(b"?")[0] for target in engine.targets} <= ALLOWED

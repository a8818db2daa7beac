"""Session servers as processes, an upstream with scripted responses, and agents as their clients."""

import http.client
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.cluster import Process
from support.upstream import Message, ReceivedRequest, Respond, Response, Server, answer, serving, user
from support.waiting import HANG_S, wait_until

HEADPOND = str(Path(sys.executable).parent / "headpond")
READY = re.compile(r"action=sessions_ready url=http://([\d.]+):(\d+)")
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, kw_only=True)
class HttpResponse:
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        error = self.json["error"]
        assert (set(self.json), set(error)) == ({"error"}, {"message", "type", "code"}), self.body
        return error["message"]

    @property
    def content(self) -> str:
        return self.json["choices"][0]["message"]["content"]

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]


class SessionsProcess(Process):
    def __init__(
        self,
        directory: Path,
        backend: str,
        *arguments: str,
        store: str = "store",
        files: int | None = None,
        variables: Mapping[str, str] | None = None,
        **settings: str,
    ) -> None:
        self.store = directory / store
        command = [HEADPOND, "sessions", "--port", "0", "--engine-urls", backend, "--store", f"file://{self.store}"]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HEADPOND_")}
        given = {"sessions__engine_wait_s": "0", **settings}
        environment |= {f"HEADPOND_{key.upper()}": value for key, value in given.items()}
        environment |= variables or {}
        if files:
            command = ["sh", "-c", 'ulimit -n "$0" && exec "$@"', str(files), *command]
        name = f"sessions-{len(list(directory.iterdir()))}"
        super().__init__(name, [*command, *arguments], environment, directory)

    @property
    def address(self) -> tuple[str, int]:
        """Waits until the server listens."""
        match = wait_until(lambda: READY.search(self.text) or self.exit_code is not None)
        assert isinstance(match, re.Match), f"the session server ended:\n{self.text}"
        return match[1], int(match[2])

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.address)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self.address, timeout=HANG_S)

    def request(
        self, method: str, path: str, request: Any = None, headers: dict[str, str] | None = None
    ) -> HttpResponse:
        """A request that is not bytes is sent as JSON."""
        body = request if isinstance(request, bytes) or request is None else json.dumps(request).encode()
        with closing(self.connect()) as connection:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return HttpResponse(status=response.status, headers=response.getheaders(), body=response.read())

    def agent(self, **fields: Any) -> "Agent":
        response = self.request("POST", "/sessions", fields)
        assert response.status == 200, response.body
        assert set(response.json) == {"session_id", "base_url", "secret", "control_secret"}
        return Agent(
            server=self,
            id=response.json["session_id"],
            secret=response.json["secret"],
            control_secret=response.json["control_secret"],
            base_url=response.json["base_url"],
        )

    def status(self) -> dict[str, Any]:
        return self.request("GET", "/status").json


@dataclass(kw_only=True)
class Agent:
    """The client of one session. `talk` keeps the conversation."""

    server: SessionsProcess
    id: str
    secret: str
    control_secret: str
    base_url: str
    messages: list[Message] = field(default_factory=list[Message])

    @property
    def path(self) -> str:
        return f"/sessions/{self.id}"

    def request(self, method: str, path: str = "", request: Any = None, **headers: str) -> HttpResponse:
        """With the control secret where it is needed."""
        control = method == "DELETE" or path in ("/seal", "/rewards")
        given = {"Authorization": f"Bearer {self.control_secret if control else self.secret}"}
        given |= {name.replace("_", "-"): text for name, text in headers.items()}
        return self.server.request(method, self.path + path, request, given)

    def chat(self, messages: list[Message] | str, **fields: Any) -> HttpResponse:
        messages = [user(messages)] if isinstance(messages, str) else messages
        return self.request("POST", CHAT, {"messages": messages, **fields})

    def talk(self, text: str, **fields: Any) -> HttpResponse:
        """Append `text` to the conversation and send it; the completion is appended too."""
        response = self.chat([*self.messages, user(text)], **fields)
        assert response.status == 200, response.body
        self.messages += [user(text), response.json["choices"][0]["message"]]
        return response

    def turns(self) -> int:
        return len(self.request("GET").json["records"])

    def assert_usable(self) -> None:
        """The session accepts a chat and records it."""
        before = self.turns()
        assert self.chat("are you there?").status == 200
        assert self.turns() == before + 1


@dataclass(kw_only=True)
class Script:
    """Responses of the upstream by last message; other messages get a default response."""

    server: Server
    responses: dict[str, Respond] = field(default_factory=dict[str, Respond])
    dialect: str = "vllm"
    routed: bool = True
    """whether a default response has routed experts"""

    def respond(self, request: ReceivedRequest) -> Response:
        if request.path != CHAT:
            return Response(body=json.dumps({"path": request.path, "method": request.method}).encode(), headers=JSON)
        scripted = self.responses.get(str(request.messages[-1].get("content")))
        return scripted(request) if scripted else Response(body=self.body(request), headers=JSON)

    def body(self, request: ReceivedRequest) -> bytes:
        text = f"answer {len(request.messages)} to {request.messages[-1].get('content')}"
        return answer(request, text, dialect=self.dialect, routed=self.routed)

    def received(self, text: str) -> list[ReceivedRequest]:
        """The chats that ended with `text`."""
        chats = [request for request in self.server.received if request.path == CHAT]
        return [request for request in chats if request.messages[-1].get("content") == text]


@contextmanager
def scripted(dialect: str = "vllm") -> Iterator[Script]:
    script: list[Script] = []
    with serving(lambda request: script[0].respond(request)) as server:
        script.append(Script(server=server, dialect=dialect))
        yield script[0]


@contextmanager
def running(
    directory: Path, backend: str, *arguments: str, files: int | None = None, **settings: str
) -> Iterator[SessionsProcess]:
    process = SessionsProcess(directory, backend, *arguments, files=files, **settings)
    try:
        yield process
    finally:
        process.end()
        assert "Traceback" not in process.text, process.text[-4000:]

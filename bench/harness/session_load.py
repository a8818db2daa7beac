"""`python -m bench.harness.session_load`: load on a session server, in its own process.

Reads tasks from stdin, one JSON object per line, and writes a line of figures for each: a closed loop, a steady rate,
polling, or idle sessions. Uses raw HTTP, because the load must be cheap compared with the server it measures.
"""

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Self

import orjson

from bench.harness.processes import LineProcess
from headpond.event_loop.factory import event_loop_factory

PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
CHARACTERS_A_TURN = 40
"""of the user message of every turn after the first"""


class SessionLoad:
    """The process: `send` it a task, `receive` the task's figures, or `do` both."""

    def __enter__(self) -> Self:
        self._process = LineProcess("bench.harness.session_load")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, task: str, **options: Any) -> None:
        self._process.send(json.dumps({"task": task, **options}))

    def receive(self) -> dict[str, Any]:
        return json.loads(self._process.receive())

    def do(self, task: str, **options: Any) -> dict[str, Any]:
        self.send(task, **options)
        return self.receive()


class Connection:
    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def request(self, method: str, path: str, body: bytes = b"", *, secret: str = "") -> bytes:
        if self._writer is None or self._reader is None:
            self._reader, self._writer = await asyncio.open_connection(*self._address, limit=1 << 20)
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        )
        head += f"Authorization: Bearer {secret}\r\n" if secret else ""
        self._writer.write(head.encode() + b"\r\n" + body)
        response_head = await self._reader.readuntil(b"\r\n\r\n")
        status, length = int(response_head[9:12]), response_head.lower().partition(b"content-length: ")[2].split()
        content = await self._reader.readexactly(int(length[0]) if length else 0)
        if status >= 300:
            raise RuntimeError(f"{method} {path} answered {status}: {content[:300]!r}")
        return content

    def close(self) -> None:
        if self._writer:
            self._writer.close()


@dataclass(kw_only=True)
class Session:
    id: str
    control: str
    agents: int = 1
    """that have joined"""
    playing: int = 1


class Sessions:
    """Creates a session for every `agents` that ask for one."""

    def __init__(self, agents: int = 1) -> None:
        self._agents, self._lock = agents, asyncio.Lock()
        self._newest: Session | None = None

    async def join(self, connection: Connection) -> tuple[Session, str]:
        """The session, and the agent's path in it: each agent of several has a branch."""
        async with self._lock:
            session = self._newest
            if session is None or session.agents == self._agents:
                created = orjson.loads(await connection.request("POST", "/sessions"))
                session = self._newest = Session(id=created["session_id"], control=created["control_secret"])
            else:
                session.agents, session.playing = session.agents + 1, session.playing + 1
        branch = f"/branch/a{session.agents}" if self._agents > 1 else ""
        return session, f"/sessions/{session.id}{branch}"

    async def leave(self, session: Session, connection: Connection, *, seals: bool) -> None:
        """The last of its agents ends it."""
        session.playing -= 1
        if session.playing:
            return
        if session is self._newest:
            self._newest = None
        if seals:
            await connection.request("POST", f"/sessions/{session.id}/seal", secret=session.control)
        await connection.request("DELETE", f"/sessions/{session.id}", secret=session.control)


@dataclass(kw_only=True)
class Agent:
    """Plays one session after another, each of `turns` chats; the first user message has `characters`."""

    connection: Connection
    sessions: Sessions = field(default_factory=Sessions)
    characters: int
    turns: int
    direct: bool = False
    """sends requests to the engine itself, without a session"""
    seals: bool = False
    """seals each session before deleting it"""
    api: str = "chat"
    """chat, messages or responses"""

    def __post_init__(self) -> None:
        self._session: Session | None = None
        self._path, self._messages, self._chats = "", list[Any](), 0

    async def chat(self) -> float:
        """Duration of one chat in seconds, without creating the session and the request."""
        if not self.direct and not self._session:
            self._session, self._path = await self.sessions.join(self.connection)
        characters = CHARACTERS_A_TURN if self._messages else self.characters
        self._messages.append({"role": "user", "content": self._path[-1:] + "x" * characters})
        path = self._path + PATHS[self.api]
        body = orjson.dumps(self._request())
        started = time.perf_counter()
        response = await self.connection.request("POST", path, body)
        taken = time.perf_counter() - started
        self._chats += 1
        if self._chats < self.turns:
            self._messages += self._echo(orjson.loads(response))
        else:
            await self.end()
        return taken

    def _request(self) -> dict[str, Any]:
        match self.api:
            case "messages":
                return {"messages": self._messages, "seed": 1, "max_tokens": 1000}
            case "responses":
                return {"input": self._messages, "seed": 1, "store": False}
            case _:
                return {"messages": self._messages, "seed": 1, "logprobs": True, "return_token_ids": True}

    def _echo(self, response: dict[str, Any]) -> list[Any]:
        match self.api:
            case "messages":
                return [{"role": "assistant", "content": response["content"]}]
            case "responses":
                return response["output"]
            case _:
                return [response["choices"][0]["message"]]

    async def end(self) -> None:
        if session := self._session:
            await self.sessions.leave(session, self.connection, seals=self.seals and bool(self._messages))
        self._session, self._path, self._messages, self._chats = None, "", [], 0


async def closed_loop(
    host: str, ports: list[int], *, connections: int, seconds: float, parallel: int = 1, **agent: Any
) -> dict[str, Any]:
    """Every agent sends its next request as soon as it has a response; `parallel` agents share sessions, which are
    divided between the servers."""
    taken, shared = list[float](), [Sessions(parallel) for _ in range(-(-connections // parallel))]
    agents = [
        Agent(
            connection=Connection(host, ports[number // parallel % len(ports)]),
            sessions=shared[number // parallel],
            **agent,
        )
        for number in range(connections)
    ]
    started = time.monotonic()
    until = started + seconds

    async def play(agent: Agent) -> None:
        while time.monotonic() < until:
            taken.append(await agent.chat())

    await asyncio.gather(*map(play, agents))
    elapsed = time.monotonic() - started
    await finish(agents)
    return {"chats": len(taken), "seconds": elapsed, **quantiles(taken)}


async def steady(
    host: str, port: int, *, rate: float, connections: int, seconds: float, **agent: Any
) -> dict[str, Any]:
    """Start `rate` chats per second, without waiting for earlier ones unless no agent is free."""
    free: asyncio.Queue[Agent] = asyncio.Queue()
    agents = [Agent(connection=Connection(host, port), **agent) for _ in range(connections)]
    for each in agents:
        free.put_nowait(each)
    taken, started = list[float](), time.monotonic()

    async def chat(agent: Agent) -> None:
        taken.append(await agent.chat())
        free.put_nowait(agent)

    async with asyncio.TaskGroup() as group:
        for number in range(round(rate * seconds)):
            await asyncio.sleep(started + number / rate - time.monotonic())
            group.create_task(chat(await free.get()))
    elapsed = time.monotonic() - started
    await finish(agents)
    return {"chats": len(taken), "seconds": elapsed, **quantiles(taken)}


async def poll(targets: list[tuple[str, int, str]], *, seconds: float, interval_s: float) -> dict[str, Any]:
    """Duration of a small GET to each of several servers in turn, in seconds."""
    connections = [(Connection(host, port), path) for host, port, path in targets]
    taken: list[list[float]] = [[] for _ in targets]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for (connection, path), times in zip(connections, taken, strict=True):
            started = time.perf_counter()
            await connection.request("GET", path)
            times.append(time.perf_counter() - started)
            await asyncio.sleep(interval_s)
    for connection, _ in connections:
        connection.close()
    return {"polled": [quantiles(times) for times in taken]}


async def cycle(host: str, port: int, *, cycles: int, connections: int, **agent: Any) -> dict[str, Any]:
    """Create, use, seal and delete sessions."""
    agents, numbers = (
        [Agent(connection=Connection(host, port), **agent) for _ in range(connections)],
        iter(range(cycles)),
    )

    async def play(agent: Agent) -> None:
        for _ in numbers:
            await agent.chat()

    await asyncio.gather(*map(play, agents))
    await finish(agents)
    return {"cycles": cycles}


async def fill(host: str, port: int, *, sessions: int, connections: int, **agent: Any) -> dict[str, Any]:
    """Create sessions of one turn each and leave them idle."""
    connected = [Connection(host, port) for _ in range(connections)]
    numbers = iter(range(sessions))

    async def make(connection: Connection) -> None:
        for _ in numbers:
            await Agent(connection=connection, **agent).chat()

    await asyncio.gather(*map(make, connected))
    for connection in connected:
        connection.close()
    return {"sessions": sessions}


async def finish(agents: list[Agent]) -> None:
    await asyncio.gather(*(agent.end() for agent in agents))
    for agent in agents:
        agent.connection.close()


def quantiles(taken: list[float]) -> dict[str, float]:
    ordered = sorted(taken) or [0.0]
    return {f"p{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 95, 99)}


TASKS = {"closed_loop": closed_loop, "steady": steady, "poll": poll, "cycle": cycle, "fill": fill}


async def _perform(line: str) -> dict[str, Any]:
    task = json.loads(line)
    return await TASKS[task.pop("task")](**task)


if __name__ == "__main__":
    for line in sys.stdin:
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            sys.stdout.write(json.dumps(runner.run(_perform(line))) + "\n")
            sys.stdout.flush()

"""kill -9 at random turns with parallel chats: what is sealed equals what an uninterrupted server seals.

The masks of last answers may differ, if they were written just before the kill.
"""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from support.session_process import CHAT, Agent, HttpResponse, SessionsProcess
from support.stores import directory_store, timeless_checksum
from support.upstream import ReceivedRequest, Response, Server, answer, serving, user
from support.waiting import wait_until

from headpond.store import BlobRef
from headpond.store.columns import read_columns
from headpond.store.experts import Experts

AGENTS = ("", "a", "b")
ROUNDS = 3
SETTINGS = {"sessions__instance_id": "2" * 32, "sessions__concurrency": "3"}
TAG = "X-Tag"


class Engine:
    """Answers the chats of a round only when all of them are in flight."""

    def __init__(self) -> None:
        self.received: Counter[str] = Counter()
        self.released: dict[str, threading.Event] = {}

    def respond(self, request: ReceivedRequest) -> Response:
        tag, text = request.headers[TAG], request.messages[-1]["content"]
        self.received[f"{tag} {text}"] += 1
        self.received[""] += 1
        message = {"role": "assistant", "content": f"re: {text}", "reasoning_content": f"hm {text}"}
        return Response(body=answer(request, message, routed=True), waits_for=self.released[tag])


class Servers:
    """One server after the other, over the same store."""

    def __init__(self, directory: Path, engine: Server) -> None:
        self._directory, self._engine = directory, engine
        self.current = self._start()

    def _start(self) -> SessionsProcess:
        return SessionsProcess(self._directory, self._engine.url, **SETTINGS)

    def kill(self) -> None:
        self.current.kill()
        self.current.wait()
        self.current = self._start()
        assert self.current.address


@contextmanager
def servers(directory: Path, engine: Server) -> Iterator[Servers]:
    directory.mkdir()
    running = Servers(directory, engine)
    try:
        yield running
    finally:
        running.current.end()


class Rollout:
    """Three agents that branch off one answer and drop the thoughts of what they return."""

    def __init__(self, running: Servers, engine: Engine, tag: str) -> None:
        self.running, self.engine, self.tag = running, engine, tag
        self.conversations: dict[str, list[Any]] = {name: [] for name in AGENTS}

    def play(self) -> tuple[Any, ...]:
        self.agent = self.created()
        with ThreadPoolExecutor(len(AGENTS)) as pool:
            self.round(pool, {"": "start"})
            self.conversations = {name: list(self.conversations[""]) for name in AGENTS}
            for number in range(ROUNDS):
                self.round(pool, {name: f"{number}{name}" for name in AGENTS})
        return self.sealed()

    def created(self) -> Agent:
        while True:
            server = self.running.current
            try:
                return server.agent(rollout="r1")
            except (OSError, HTTPException):
                wait_until(lambda server=server: self.running.current is not server)

    def round(self, pool: ThreadPoolExecutor, texts: dict[str, str]) -> None:
        """Sent in order to one server, each when the one before is in flight; again, in order, after a kill."""
        pending, attempt = dict(texts), 0
        while pending:
            server = self.running.current
            released = self.engine.released[self.tag] = threading.Event()
            sent: dict[str, Future[HttpResponse | None]] = {}
            for name, text in pending.items():
                key = f"{self.tag} {text}"
                before = self.engine.received[key]
                chat = sent[name] = pool.submit(self.chat, server, name, text, attempt)
                wait_until(lambda chat=chat, key=key, n=before: chat.done() or self.engine.received[key] > n)
            released.set()
            for name, chat in sent.items():
                if (response := chat.result()) is not None:
                    message = response.json["choices"][0]["message"]
                    echo = {"role": "assistant", "content": message["content"]}
                    self.conversations[name] += [user(pending.pop(name)), echo]
            attempt += 1
            if pending:
                wait_until(lambda server=server: self.running.current is not server)

    def chat(self, server: SessionsProcess, name: str, text: str, attempt: int) -> HttpResponse | None:
        """None if the server was killed."""
        path = f"/branch/{name}{CHAT}" if name else CHAT
        messages = [*self.conversations[name], user(text)]
        headers = {"x_stainless_retry_count": str(attempt), "X_Tag": self.tag}
        response = self.request(server, path, {"messages": messages}, **headers)
        assert response is None or response.status == 200, response.body
        return response

    def request(self, server: SessionsProcess, path: str, body: Any = None, **headers: str) -> HttpResponse | None:
        try:
            return replace(self.agent, server=server).request("POST", path, body, **headers)
        except (OSError, HTTPException):
            return None

    def until_answered(self, path: str, body: Any = None, **headers: str) -> HttpResponse:
        while True:
            server = self.running.current
            if (response := self.request(server, path, body, **headers)) is not None:
                assert response.status == 200, response.body
                return response
            wait_until(lambda server=server: self.running.current is not server)

    def sealed(self) -> tuple[Any, ...]:
        """A checksum of the columns without their times, as if all answers were seen, and the rows of all samples."""
        response = self.until_answered("/seal")
        store = directory_store(self.running.current.store)
        ref = BlobRef(**response.json["columns"])
        columns = read_columns(store, ref)
        experts, rows = Experts(store, BlobRef(**response.json["experts"])), list[str]()
        for sample in range(len(columns.sample_offsets) - 1):
            length = int(np.diff(columns.sample_offsets)[sample])
            out = np.empty((length, *experts.rows.shape[1:]), np.int16)
            experts.read(sample, 0, length, out)
            rows.append(xxhash.xxh3_128_hexdigest(out.tobytes()))
        metrics = {name: value for name, value in response.json["metrics"].items() if name != "engine_s"}
        assert metrics.pop("unseen_turns") <= len(AGENTS), "the answers of a round that the agents continued are seen"
        return timeless_checksum(store, ref, seen=True), metrics, rows


def play(directory: Path, *, sessions: int, kills: int, seed: int) -> None:
    engine, chances = Engine(), random.Random(seed)
    with serving(engine.respond) as upstream, ThreadPoolExecutor(min(sessions, 16)) as pool:
        with servers(directory / "uninterrupted", upstream) as running:
            expected = Rollout(running, engine, "alone").play()
        with servers(directory / "killed", upstream) as running:
            rollouts = [pool.submit(Rollout(running, engine, f"s{number}").play) for number in range(sessions)]
            for _ in range(kills):
                until = engine.received[""] + chances.randrange(1, 2 * sessions)
                wait_until(lambda until=until: engine.received[""] >= until or all(each.done() for each in rollouts))
                running.kill()
            assert [rollout.result() for rollout in rollouts] == [expected] * sessions


def test_sessions_of_a_killed_server_seal_what_others_do(tmp_path: Path) -> None:
    play(tmp_path, sessions=4, kills=1, seed=1)


@pytest.mark.slow
def test_two_hundred_sessions_of_killed_servers_seal_what_others_do(tmp_path: Path) -> None:
    play(tmp_path, sessions=200, kills=12, seed=2)

"""Which equal requests are one turn, and which answers no client saw."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from support.session_process import CHAT, Agent, HttpResponse, Script, SessionsProcess, running
from support.stores import directory_store
from support.upstream import Response, user
from support.waiting import wait_until

from headpond.store import BlobRef
from headpond.store.columns import Columns, read_columns

RETRIED = {"x_stainless_retry_count": "1"}


def chat(agent: Agent, text: str, *, stream: bool = False, **headers: str) -> HttpResponse:
    return agent.request("POST", CHAT, {"messages": [user(text)], "stream": stream}, **headers)


def columns_of(agent: Agent) -> Columns:
    sealed = agent.request("POST", "/seal").json
    return read_columns(directory_store(agent.server.store), BlobRef(**sealed["columns"]))


def tokens_by_turn(columns: Columns) -> list[Any]:
    """The loss mask of each turn's completion."""
    turns = columns.turns
    return [columns.loss_mask[start:end] for start, end in zip(turns.start, turns.end, strict=True)]


@contextmanager
def left(agent: Agent, script: Script, text: str) -> Iterator[threading.Event]:
    """A chat whose client has disconnected while the engine answers; the event lets it."""
    answered = threading.Event()
    script.responses[text] = lambda request: Response(body=script.body(request), waits_for=answered)
    body = json.dumps({"messages": [user(text)], "stream": False}).encode()
    head = f"POST {agent.path}{CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    before = len(script.received(text))
    with socket.create_connection(agent.server.address) as client:
        client.sendall(head + body)
        wait_until(lambda: len(script.received(text)) == before + 1)
    try:
        yield answered
    finally:
        answered.set()


def test_an_agent_that_samples_one_prompt_again_gets_another_turn(agent: Agent, script: Script) -> None:
    before = len(script.received("sampled"))
    assert [chat(agent, "sampled", x_stainless_retry_count="0").status for _ in range(3)] == [200] * 3
    assert (agent.turns(), len(script.received("sampled")) - before) == (3, 3)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("headers", [RETRIED, {"Idempotency_Key": "k1"}], ids=["retry count", "key"])
def test_a_retry_gets_the_recorded_answer(
    agent: Agent, script: Script, headers: dict[str, str], stream: bool, request: pytest.FixtureRequest
) -> None:
    text = f"retried {request.node.name}"
    first = chat(agent, text, stream=stream, **({} if headers is RETRIED else headers))
    again = chat(agent, text, stream=stream, **headers)
    assert (first.status, again.status) == (200, 200)
    assert again.body == first.body
    assert again.all("content-type") == first.all("content-type")
    assert (agent.turns(), len(script.received(text))) == (1, 1)
    assert chat(agent, text, stream=stream, Idempotency_Key="another").status == 200
    assert agent.turns() == 2


def test_a_retry_joins_the_chat_that_its_client_left(agent: Agent, script: Script, sessions: SessionsProcess) -> None:
    before = sessions.status()["chats"]["sent_again"]
    with left(agent, script, "joined") as answered, ThreadPoolExecutor(1) as pool:
        again: Future[HttpResponse] = pool.submit(chat, agent, "joined")
        wait_until(lambda: sessions.status()["chats"]["sent_again"] == before + 1)
        assert chat(agent, "another request").status == 409
        answered.set()
        assert again.result().content == "answer 1 to joined"
    assert (agent.turns(), len(script.received("joined"))) == (1, 1)
    columns = columns_of(agent)
    assert columns.loss_mask.sum() == len("answer 1 to joined")


def recorded_unseen(agent: Agent, script: Script, text: str) -> None:
    with left(agent, script, text) as answered:
        answered.set()
        wait_until(lambda: agent.turns() == 1)


def test_an_answer_that_no_client_saw_is_masked(agent: Agent, script: Script) -> None:
    recorded_unseen(agent, script, "unseen")
    agent.messages = [user("something else")]
    assert agent.chat(agent.messages).status == 200
    assert agent.request("GET").json["metadata"]["unseen_turns"] == 1
    columns = columns_of(agent)
    assert columns.turns.unseen is not None
    assert columns.turns.unseen.tolist() == [1, 0]
    assert columns.loss_mask[columns.sample(0)].sum() == 0
    assert columns.loss_mask[columns.sample(1)].sum() == len("answer 1 to something else")
    assert columns.metrics["unseen_turns"] == 1


@pytest.mark.parametrize("how", ["sent again", "extended"])
def test_an_answer_is_seen_once_a_client_has_it(agent: Agent, script: Script, how: str) -> None:
    text = f"seen: {how}"
    recorded_unseen(agent, script, text)
    answer = agent.request("GET").json["records"][0]["response"]["choices"][0]["message"]
    if how == "sent again":
        assert chat(agent, text).content == answer["content"]
    else:
        assert agent.chat([user(text), answer, user("go on")]).status == 200
    columns = columns_of(agent)
    assert columns.loss_mask.sum() >= len(answer["content"])
    assert columns.metrics["unseen_turns"] == 0


def test_what_was_seen_survives_a_kill(script: Script, tmp_path: Any) -> None:
    name = {"sessions__instance_id": "1" * 32}
    with running(tmp_path, script.server.url, **name) as server:
        seen, unseen, last, continued = (server.agent() for _ in range(4))
        seen.talk("hello")
        recorded_unseen(unseen, script, "killed")
        log = next(path for path in server.store.rglob(".columns*") if seen.id in str(path))
        wait_until(lambda: b'"seen":"[0]"' in log.read_bytes())
        for agent in (last, continued):  # the kill may come before the log has the notes
            agent.talk("hello")
        server.kill()
    with running(tmp_path, script.server.url, **name) as server:
        seen.server = unseen.server = last.server = continued.server = server
        unknown = last.request("GET").json["metadata"]["unseen_turns"]
        assert columns_of(last).loss_mask.any() == (unknown == 0)
        continued.talk("go on")
        first, second = tokens_by_turn(columns_of(continued))
        assert (first.all(), second.all()) == (True, True)
        assert columns_of(seen).loss_mask.any()
        assert unseen.request("GET").json["metadata"]["unseen_turns"] == 1
        assert chat(unseen, "killed").content == "answer 1 to killed"
        assert len(script.received("killed")) == 1
        assert columns_of(unseen).loss_mask.any()


def test_a_failed_chat_is_played_again(agent: Agent, script: Script) -> None:
    script.responses["fails"] = lambda request: Response(body=b"{}")
    assert chat(agent, "fails").status == 502
    del script.responses["fails"]
    assert chat(agent, "fails", **RETRIED).content == "answer 1 to fails"
    assert agent.turns() == 1

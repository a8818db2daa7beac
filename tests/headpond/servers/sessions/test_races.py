import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from support.session_process import CHAT, Agent, HttpResponse, Script, SessionsProcess
from support.stores import directory_store
from support.upstream import Response
from support.waiting import wait_until

from headpond.store import BlobRef

BUSY = "session already has an in-flight chat completion"


@contextmanager
def in_flight(agent: Agent, script: Script, text: str) -> Iterator[tuple[Future[HttpResponse], threading.Event]]:
    """A chat that the upstream has received and answers when the event is set."""
    answered = threading.Event()
    script.responses[text] = lambda request: Response(body=script.body(request), waits_for=answered)
    with ThreadPoolExecutor(1) as pool:
        chat = pool.submit(agent.chat, text)
        try:
            wait_until(lambda: script.received(text))
            yield chat, answered
        finally:
            answered.set()


def test_a_second_chat_is_refused_at_once_and_not_sent(agent: Agent, sessions: SessionsProcess, script: Script) -> None:
    before = sessions.status()["refused"].get("409", 0)
    with in_flight(agent, script, "first") as (chat, answered):
        response = agent.chat("second")
        assert (response.status, response.error) == (409, BUSY)
        with socket.create_connection(sessions.address) as client:  # before its body is read
            client.sendall(f"POST {agent.path}{CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n".encode())
            assert client.recv(1000).startswith(b"HTTP/1.1 409 ")
        assert not chat.done()
        assert sessions.agent().chat("another session").status == 200
        assert agent.request("GET").json["records"] == []
        answered.set()
        assert chat.result().status == 200
    assert not script.received("second")
    assert sessions.status()["refused"]["409"] == before + 2
    agent.assert_usable()


def test_deleting_a_session_ends_its_chat_and_the_engines_request(
    agent: Agent, sessions: SessionsProcess, script: Script
) -> None:
    before = sessions.status()["chats"]["recorded"]
    gone = (404, f"session not found: session_id={agent.id}")
    with in_flight(agent, script, "deleted meanwhile") as (chat, _):
        answering = script.server.answering
        assert agent.request("DELETE").status == 204
        assert (chat.result().status, chat.result().error) == gone
        wait_until(lambda: script.server.answering < answering)
        response = agent.chat("closing beats busy")
        assert (response.status, response.error) == gone
        assert agent.request("DELETE").status == 404
    assert sessions.status()["chats"]["recorded"] == before
    assert not list(sessions.store.rglob(agent.id))
    assert not script.received("closing beats busy")


def test_sealing_abandons_the_chat_in_flight_and_keeps_what_was_recorded(agent: Agent, script: Script) -> None:
    """A rollout's time limit ends during a generation: what it has generated before is its result."""
    agent.talk("recorded")
    with in_flight(agent, script, "too late") as (chat, _):
        answering = script.server.answering
        sealed = agent.request("POST", "/seal", {"error": "out of time"})
        assert (sealed.status, sealed.json["turns"]) == (200, 1)
        assert chat.result().status == 404
        wait_until(lambda: script.server.answering < answering)
        assert agent.request("POST", "/seal").json == sealed.json


def test_a_session_whose_only_chat_is_abandoned_has_nothing_to_train_on(agent: Agent, script: Script) -> None:
    with in_flight(agent, script, "the only one") as (chat, _):
        assert agent.request("POST", "/seal").status == 422
        assert chat.result().status == 404
    agent.assert_usable()


def together(*calls: Callable[[], HttpResponse]) -> list[HttpResponse]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [call.result() for call in [pool.submit(call) for call in calls]]


def test_one_of_many_deletes_succeeds(sessions: SessionsProcess) -> None:
    for _ in range(5):
        agent = sessions.agent()
        agent.talk("hello")
        statuses = [response.status for response in together(*[lambda agent=agent: agent.request("DELETE")] * 8)]
        assert sorted(statuses) == [204] + [404] * 7


def test_concurrent_chats_are_serialized_or_refused(agent: Agent, script: Script) -> None:
    responses = together(*[lambda number=number: agent.chat(f"at once {number}") for number in range(8)])
    statuses = [each.status for each in responses]
    assert set(statuses) <= {200, 409}
    assert agent.turns() == statuses.count(200) == sum(len(script.received(f"at once {number}")) for number in range(8))


def test_a_chat_or_seal_beside_a_delete_is_complete_or_refused(sessions: SessionsProcess) -> None:
    for _ in range(10):
        agent = sessions.agent()
        agent.talk("hello")
        chat, seal, delete = together(
            lambda agent=agent: agent.chat("again"),
            lambda agent=agent: agent.request("POST", "/seal"),
            lambda agent=agent: agent.request("DELETE"),
        )
        assert chat.status in (200, 404)
        assert (delete.status, seal.status in (200, 404)) == (204, True)
        if seal.status == 200:
            assert directory_store(sessions.store).open(BlobRef(**seal.json["columns"])).size
        else:
            assert not list(sessions.store.rglob(agent.id))


def test_many_sessions_can_be_created_and_deleted_concurrently(sessions: SessionsProcess) -> None:
    def live(number: int) -> list[int]:
        agent = sessions.agent()
        first, second = agent.chat(f"life {number}"), agent.chat(f"and {number}")
        return [first.status, second.status, agent.request("DELETE").status, agent.request("DELETE").status]

    before = sessions.status()["sessions"]["open"]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(live, range(20))) == [[200, 200, 204, 404]] * 20
    assert sessions.status()["sessions"]["open"] == before


def test_a_slow_chat_delays_no_other_session(sessions: SessionsProcess, script: Script) -> None:
    with in_flight(sessions.agent(), script, "very slow"):
        others = [sessions.agent() for _ in range(4)]
        chats = together(*[lambda agent=agent: agent.chat("quick") for agent in others])
        health = together(*[lambda: sessions.request("GET", "/health")] * 4)
        assert {response.status for response in chats + health} == {200}

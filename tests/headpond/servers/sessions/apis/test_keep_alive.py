"""Streams of chats that take long: keep-alives, errors behind them, and clients that leave meanwhile."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.api_clients import CLIENTS, ApiClient
from support.session_process import Script, running
from support.upstream import Response, user
from support.waiting import wait_until


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_slow_stream_is_kept_alive_and_an_error_comes_in_it(
    script: Script, tmp_path: Path, client: ApiClient
) -> None:
    events = [threading.Event() for _ in range(2)]
    script.responses["slow"] = lambda request: Response(body=script.body(request), waits_for=events[0])
    script.responses["fails"] = lambda _: Response(status=500, body=b"broken", waits_for=events[1])
    with running(tmp_path, script.server.url, sessions__keep_alive_s="0.05") as process, ThreadPoolExecutor(1) as pool:
        agent = process.agent()
        for text, event in zip(("slow", "fails"), events, strict=True):
            connection = process.connect()
            body = client.request(client.items([user(text)])) | {"stream": True}
            connection.request("POST", agent.path + client.path, json.dumps(body))
            response = pool.submit(connection.getresponse).result()  # its head came before the answer
            assert response.status == 200
            kept = response.read1()
            assert kept.startswith(b"event: ping" if client.name == "messages" else b": keep-alive")
            event.set()
            received = kept + response.read()
            connection.close()
            if text == "slow":
                assert client.answer(client.streamed(received)), received
        assert b"broken" in received
        assert b"event: error\n" in received or client.name == "chat"
        wait_until(lambda: agent.request("GET").json["metadata"]["unseen_turns"] == 0)
        assert agent.turns() == 1


def test_a_client_that_leaves_a_kept_alive_stream_gets_the_answer_later(script: Script, tmp_path: Path) -> None:
    answered, client = threading.Event(), CLIENTS[1]
    script.responses["patience"] = lambda request: Response(body=script.body(request), waits_for=answered)
    with running(tmp_path, script.server.url, sessions__keep_alive_s="0.05") as process:
        agent, connection = process.agent(), process.connect()
        body = client.request(client.items([user("patience")])) | {"stream": True}
        connection.request("POST", agent.path + client.path, json.dumps(body))
        assert connection.getresponse().read1()
        connection.close()
        answered.set()
        wait_until(lambda: agent.turns() == 1)
        assert agent.request("GET").json["metadata"]["unseen_turns"] == 1
        again = agent.request("POST", client.path, body)
        assert client.answer(client.streamed(again.body))
        wait_until(lambda: agent.request("GET").json["metadata"]["unseen_turns"] == 0)
        assert (agent.turns(), len(script.received("patience"))) == (1, 1)

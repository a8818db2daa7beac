import socket

from support.raw_server import http_response, raw_server
from support.waiting import HANG_S

from penstock.inspection.why import of_the_step, why_silent


def test_any_http_response_is_an_answer() -> None:
    with raw_server(lambda connection, *_: connection.sendall(http_response(b"", status=b"503 Loading"))) as server:
        assert why_silent(server.url, timeout_s=HANG_S) is None


def test_a_server_that_does_not_speak_http_does_not_answer() -> None:
    def greet(connection: socket.socket, *_: object) -> None:
        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
        connection.close()

    with raw_server(greet) as server:
        assert "SSH-2.0" in (why_silent(server.url, timeout_s=HANG_S) or "")


def test_a_closed_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    assert why_silent(f"http://127.0.0.1:{port}") == "Connection refused"


def test_a_run_with_all_its_steps_waits_for_no_further_one() -> None:
    seen, groups = {"step": 59, "steps": 60}, {"waits_for": "groups", "groups": []}
    assert of_the_step(seen, groups | {"step": 59}) == ["step 59 waits for its first groups"]
    (cause,) = of_the_step(seen | {"step": 60}, groups | {"step": 60})
    assert cause.startswith("all 60 steps are delivered: the run ends when")

import re
import socket
from functools import partial
from typing import Any

from support.raw_server import http_response, raw_server
from support.waiting import HANG_S

from headpond.inspection.run_state import State
from headpond.inspection.status import Seen
from headpond.inspection.why import of_a_stopped_run, of_the_end, of_the_step, why_silent, workers_seen


def seen(state: State = State.RUNNING, status_age_s: float = 0.5, **values: Any) -> Seen:
    return Seen(run_dir="", state=state, status_age_s=status_age_s, redis={}, ledger={}, **values)


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
    groups = {"waits_for": "groups", "groups": []}
    assert of_the_step(seen(step=59, steps=60), groups | {"step": 59}) == ["step 59 waits for its first groups"]
    (cause,) = of_the_step(seen(step=60, steps=60), groups | {"step": 60})
    assert cause.startswith("all 60 steps are delivered: the run ends when")


def test_a_complete_run_is_done_whatever_its_notes_say() -> None:
    ended = partial(seen, State.DONE, steps=60)
    assert of_the_end(ended(step=60, notes=["the store keeps 3.0 GB of delivered steps"])) == [
        "the run is done: 60 of 60 steps are delivered"
    ]
    used_up = ["the examples of every environment are used up after 59 of 60 steps"]
    assert of_the_end(ended(step=59, notes=used_up)) == used_up
    assert of_the_end(ended(step=59)) == ["the run is done: 59 of 60 steps are delivered"]


def test_of_a_stopped_run_only_what_was_running_is_interrupted() -> None:
    states = {"g0-0": "running", "g0-1": "queued", "g0-2": "waiting"}
    jobs = [{"job": job, "state": state, "worker": None, "running_s": 1.0} for job, state in states.items()]
    jobs[0]["worker"] = "host-1"
    next_step = {"groups": [{"group": "g0", "next": "after 9 s more it is dropped", "jobs": jobs}], "jobs": jobs[:1]}
    found = of_a_stopped_run(next_step)
    (group,) = found["groups"]
    assert group["next"] is None
    assert [(job["state"], job["worker"], job["next"]) for job in group["jobs"]] == [
        ("interrupted", None, "it runs again when the run is resumed"),
        ("queued", None, "it runs when the run is resumed"),
        ("waiting", None, "it runs when the run is resumed"),
    ]
    assert [job["state"] for job in found["jobs"]] == ["interrupted"]


def test_a_worker_that_has_gone_silent_is_shown_with_its_age_while_the_orchestrator_listens() -> None:
    said = {"kind": "rollouts", "pid": 7, "running": 0, "refused": None}
    values = {"silent_workers": {"dead@vm": 8.5}, "present_workers": {"dead@vm": said, "alive@vm": said}}
    ages = {node: found["last_seen_s"] for node, found in workers_seen(seen(**values)).items()}
    assert ages == {"dead@vm": 9.0, "alive@vm": None}
    stopped = workers_seen(seen(State.STOPPED, 900.0, **values))
    assert {found["last_seen_s"] for found in stopped.values()} == {None}


def test_a_job_that_waits_for_its_next_attempt_is_in_no_queue() -> None:
    job = {"job": "g0-1", "state": "waiting", "worker": None, "running_s": None, "queue": "rollouts", "replica": None}
    job |= {"error": "the engine answered 500", "next": "it is submitted in 4 s"}
    group = {"group": "g0", "environment": "sums", "example": 3, "state": "play", "rollouts": {"generated": 3}}
    next_step = {"step": 7, "waits_for": "groups", "groups": [group | {"jobs": [job]}]}
    (cause,) = of_the_step(seen(step=7, steps=60), next_step)
    assert re.fullmatch(
        r"step 7 .*g0 \(sums, example 3\): 3 .*generated; g0-1 is waiting, .*the engine answered 500; .*4 s", cause
    )

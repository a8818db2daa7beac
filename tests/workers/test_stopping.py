"""How a worker starts and stops around its bodies: one real process a test, real signals."""

import signal
from typing import Any

from support.waiting import wait_until

from tests.workers import pool_app
from tests.workers.conftest import Events, Said, StartWorker


def send(task: Any, queue: str, *args: object) -> str:
    return task.apply_async(args, queue=queue).id


def test_sigterm_lets_bodies_finish_and_returns_what_waits_to_the_queue(
    start_worker: StartWorker, said: Said, events: Events
) -> None:
    worker = start_worker("warm", "-c", "4", POOL_APP_PREFETCH="1")
    ids = [send(pool_app.hold, "warm", str(n)) for n in range(10)]
    said.wait_for("started", 4)
    wait_until(lambda: said.broker.llen("warm") == 0)
    worker.send_signal(signal.SIGTERM)
    wait_until(lambda: "action=drain active=4" in worker.log)
    said.open_gate()
    assert worker.wait() == 0
    assert sorted(said.all("started")) == sorted(said.all("finished")) == ["0", "1", "2", "3"]
    assert said.all("lifespan") == ["entering", "left after 4 bodies"]
    assert said.broker.llen("warm") == 6
    assert events.wait_for(ids[0], "task-succeeded")


def test_a_job_revoked_while_it_waits_never_starts(start_worker: StartWorker, said: Said, events: Events) -> None:
    worker = start_worker("waits", "-c", "1", POOL_APP_PREFETCH="1")
    running, waiting = send(pool_app.hold, "waits", "running"), send(pool_app.hold, "waits", "waiting")
    said.wait_for("started", 1)
    wait_until(lambda: said.broker.llen("waits") == 0)
    pool_app.app.control.revoke(waiting, terminate=True, destination=[worker.name], reply=True)
    said.open_gate()
    events.wait_for(running, "task-succeeded")
    events.wait_for(waiting, "task-revoked")
    assert said.all("started") == ["running"]


def test_sigquit_cancels_bodies_which_can_still_reply(start_worker: StartWorker, said: Said, events: Events) -> None:
    worker = start_worker("cold", "-c", "50")
    ids = [send(pool_app.hold, "cold", str(n)) for n in range(50)]
    said.wait_for("started", 50)
    worker.send_signal(signal.SIGQUIT)
    worker.wait()
    assert sorted(said.all("cancelled")) == sorted(f"{n}: stopping" for n in range(50))
    assert said.all("lifespan") == ["entering", "left after 50 bodies"]
    assert events.wait_for(ids[0], "task-revoked")["terminated"] is True


def test_a_second_signal_ends_the_drain(start_worker: StartWorker, said: Said) -> None:
    worker = start_worker("second", "-c", "2")
    send(pool_app.hold, "second", "one")
    said.wait_for("started", 1)
    worker.send_signal(signal.SIGINT)
    wait_until(lambda: "action=drain active=1" in worker.log)
    worker.send_signal(signal.SIGTERM)
    worker.wait()
    assert said.all("cancelled") == ["one: stopping"]


def test_a_drain_takes_no_longer_than_it_may_and_abandons_what_clings(start_worker: StartWorker, said: Said) -> None:
    worker = start_worker("long", "-c", "2", POOL_APP_DRAIN_S="0.1", POOL_APP_RELEASE_S="0.5")
    send(pool_app.hold, "long", "long")
    send(pool_app.cling, "long", "clings")
    said.wait_for("started", 2)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert sorted(said.all("cancelled")) == ["clings: stopping", "long: stopping"]
    assert "action=bodies_abandoned count=1" in worker.log


def test_a_life_span_that_cannot_be_entered_stops_the_worker_with_its_message(start_worker: StartWorker) -> None:
    worker = start_worker("fails", ready=False, POOL_APP_LIFESPAN="fails")
    assert worker.wait() == 1
    assert "action=start_failed: no store at /nowhere: set PENSTOCK_STORE" in worker.log
    assert "Traceback" not in worker.log


def test_a_worker_can_be_stopped_while_its_life_span_hangs(start_worker: StartWorker, said: Said) -> None:
    worker = start_worker("hangs", ready=False, POOL_APP_LIFESPAN="hangs")
    said.wait_for("lifespan", 1)
    worker.send_signal(signal.SIGTERM)
    worker.wait()


def test_a_life_span_that_breaks_stops_the_worker(start_worker: StartWorker, said: Said) -> None:
    worker = start_worker("breaks", "-c", "2")
    send(pool_app.hold, "breaks", "one")
    said.wait_for("started", 1)
    said.redis.set("broken", 1)
    assert worker.wait() == 1
    assert said.all("cancelled") == ["one: stopping"]
    assert "the background of the life span broke" in worker.log

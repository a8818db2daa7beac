"""Start and stop of a worker: one real process a test, real signals."""

import signal
from typing import Any

from support.waiting import wait_until

from tests.workers import pool_app
from tests.workers.conftest import Bodies, Events, StartWorker


def send(task: Any, queue: str, *args: object) -> str:
    return task.apply_async(args, queue=queue).id


def test_sigterm_lets_bodies_finish_and_returns_waiting_messages_to_the_queue(
    start_worker: StartWorker, bodies: Bodies, events: Events
) -> None:
    worker = start_worker("warm", "-c", "4", POOL_APP_PREFETCH="1")
    ids = [send(pool_app.hold, "warm", str(n)) for n in range(10)]
    bodies.wait_for("started", 4)
    wait_until(lambda: bodies.broker.llen("warm") == 0)
    worker.send_signal(signal.SIGTERM)
    wait_until(lambda: "action=drain active=4" in worker.log)
    bodies.open_gate()
    assert worker.wait() == 0
    assert sorted(bodies.all("started")) == sorted(bodies.all("finished")) == ["0", "1", "2", "3"]
    assert bodies.all("lifespan") == ["entering", "left after 4 bodies"]
    assert bodies.broker.llen("warm") == 6
    assert events.wait_for(ids[0], "task-succeeded")


def test_a_delivery_revoked_while_waiting_never_starts(
    start_worker: StartWorker, bodies: Bodies, events: Events
) -> None:
    worker = start_worker("waits", "-c", "1", POOL_APP_PREFETCH="1")
    running, waiting = send(pool_app.hold, "waits", "running"), send(pool_app.hold, "waits", "waiting")
    bodies.wait_for("started", 1)
    wait_until(lambda: bodies.broker.llen("waits") == 0)
    pool_app.app.control.revoke(waiting, terminate=True, destination=[worker.name], reply=True)
    bodies.open_gate()
    events.wait_for(running, "task-succeeded")
    events.wait_for(waiting, "task-revoked")
    assert bodies.all("started") == ["running"]


def test_sigquit_cancels_bodies_which_can_still_reply(
    start_worker: StartWorker, bodies: Bodies, events: Events
) -> None:
    worker = start_worker("cold", "-c", "50")
    ids = [send(pool_app.hold, "cold", str(n)) for n in range(50)]
    bodies.wait_for("started", 50)
    worker.send_signal(signal.SIGQUIT)
    worker.wait()
    assert sorted(bodies.all("cancelled")) == sorted(f"{n}: stopping" for n in range(50))
    assert bodies.all("lifespan") == ["entering", "left after 50 bodies"]
    assert events.wait_for(ids[0], "task-revoked")["terminated"] is True


def test_a_second_signal_ends_the_drain(start_worker: StartWorker, bodies: Bodies) -> None:
    worker = start_worker("second", "-c", "2")
    send(pool_app.hold, "second", "one")
    bodies.wait_for("started", 1)
    worker.send_signal(signal.SIGINT)
    wait_until(lambda: "action=drain active=1" in worker.log)
    worker.send_signal(signal.SIGTERM)
    worker.wait()
    assert bodies.all("cancelled") == ["one: stopping"]


def test_a_drain_ends_in_time_and_abandons_stubborn_bodies(start_worker: StartWorker, bodies: Bodies) -> None:
    worker = start_worker("long", "-c", "2", POOL_APP_DRAIN_S="0.1", POOL_APP_RELEASE_S="1.5")
    send(pool_app.hold, "long", "long")
    send(pool_app.cling, "long", "clings")
    bodies.wait_for("started", 2)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert sorted(bodies.all("cancelled")) == ["clings: stopping", "long: stopping"]
    assert "action=bodies_abandoned count=1" in worker.log


def test_a_lifespan_that_cannot_be_entered_stops_the_worker_with_its_message(start_worker: StartWorker) -> None:
    worker = start_worker("fails", ready=False, POOL_APP_LIFESPAN="fails")
    assert worker.wait() == 1
    assert "action=start_failed: no store at /nowhere: set HEADPOND_STORE" in worker.log
    assert "Traceback" not in worker.log


def test_a_worker_can_be_stopped_while_its_lifespan_hangs(start_worker: StartWorker, bodies: Bodies) -> None:
    worker = start_worker("hangs", ready=False, POOL_APP_LIFESPAN="hangs")
    bodies.wait_for("lifespan", 1)
    worker.send_signal(signal.SIGTERM)
    worker.wait()


def test_a_lifespan_that_breaks_stops_the_worker(start_worker: StartWorker, bodies: Bodies) -> None:
    worker = start_worker("breaks", "-c", "2")
    send(pool_app.hold, "breaks", "one")
    bodies.wait_for("started", 1)
    bodies.redis.set("broken", 1)
    assert worker.wait() == 1
    assert bodies.all("cancelled") == ["one: stopping"]
    assert "the background of the lifespan broke" in worker.log

"""The pool in a real worker with 300 slots, shared by all tests; each ends its bodies before the next."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.waiting import wait_until
from support.worker_process import WorkerProcess

from tests.workers import pool_app
from tests.workers.conftest import Bodies, Events, StartWorker

SLOTS = 300
QUEUE = "shared"


@pytest.fixture(scope="module")
def worker(start_worker: StartWorker, events: Events) -> WorkerProcess:
    return start_worker(QUEUE, "-c", str(SLOTS))


@pytest.fixture(autouse=True)
def idle(worker: WorkerProcess, bodies: Bodies) -> Iterator[None]:
    bodies.close_gate()
    yield
    bodies.open_gate()
    wait_until(lambda: (pool := stats(worker))["active"] + pool["waiting"] + pool["leaving"] == 0)


def send(task: Any, *args: object, **options: Any) -> str:
    return task.apply_async(args, queue=QUEUE, argsrepr="", kwargsrepr="", **options).id


def stats(worker: WorkerProcess) -> dict[str, Any]:
    answer = pool_app.app.control.inspect(destination=[worker.name], timeout=10, limit=1).stats()
    assert answer is not None
    return answer[worker.name]["pool"]


def test_as_many_bodies_run_at_once_as_there_are_slots(worker: WorkerProcess, bodies: Bodies) -> None:
    for n in range(SLOTS):
        send(pool_app.hold, str(n))
    wait_until(lambda: bodies.redis.scard("running") == SLOTS)
    bodies.open_gate()
    assert len(bodies.wait_for("finished", SLOTS)) == SLOTS


def test_no_more_bodies_run_than_the_limit_and_the_rest_stays_in_the_queue(
    worker: WorkerProcess, bodies: Bodies
) -> None:
    control = pool_app.app.control
    control.pool_shrink(SLOTS - 2, destination=[worker.name], reply=True)
    for n in range(6):
        send(pool_app.hold, str(n))
    wait_until(lambda: bodies.redis.scard("running") == 2)
    assert stats(worker)["active"] == 2
    assert bodies.broker.llen(QUEUE) == 4
    control.pool_grow(1, destination=[worker.name], reply=True)
    wait_until(lambda: bodies.redis.scard("running") == 3)
    bodies.open_gate()
    bodies.wait_for("finished", 6)
    assert max(int(count) for count in bodies.all("counts")) <= 3
    control.pool_grow(SLOTS - 3, destination=[worker.name], reply=True)


def test_a_monitor_sees_a_task_start_and_succeed(events: Events) -> None:
    task_id = send(pool_app.nothing)
    assert events.wait_for(task_id, "task-succeeded")["runtime"] < 60
    assert events.of(task_id) == ["task-received", "task-started", "task-succeeded"]


def test_a_failure_shows_its_type_and_no_argument(worker: WorkerProcess, events: Events) -> None:
    task_id = send(pool_app.fail, "a prompt")
    failed = events.wait_for(task_id, "task-failed")
    assert failed["exception"] == "ValueError('the engine refused')"
    assert "in fail" in failed["traceback"]
    assert "a prompt" not in json.dumps(events.received)
    assert f"Task pool_app.fail[{task_id}] failed: ValueError" in worker.log
    assert "a prompt" not in worker.log


def test_a_coroutine_with_pydantic_arguments_gets_models(bodies: Bodies) -> None:
    send(pool_app.order, pool_app.Order(name="rollout", count=8))
    assert bodies.wait_for("ordered", 1) == ["Order rollout 8"]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (pool_app.plain, "pool_app.plain is not an `async def`, and queue shared is served by the asyncio pool"),
        (pool_app.leave, "StageError('pool_app.exit tried to end the process: SystemExit(3)')"),
        (pool_app.cancel_itself, "CancelledError('the body cancelled itself')"),
    ],
)
def test_a_body_that_misbehaves_fails_only_its_own_task(task: Any, message: str, events: Events) -> None:
    assert message in events.wait_for(send(task), "task-failed")["exception"]
    events.wait_for(send(pool_app.nothing), "task-succeeded")


def test_a_child_task_that_exits_does_not_end_the_loop(events: Events) -> None:
    events.wait_for(send(pool_app.leave_in_child), "task-failed")
    events.wait_for(send(pool_app.nothing), "task-succeeded")


def test_past_the_soft_limit_a_body_is_cancelled_and_its_task_fails(bodies: Bodies, events: Events) -> None:
    task_id = send(pool_app.hold, "slow", soft_time_limit=0.05)
    assert events.wait_for(task_id, "task-failed")["exception"] == "SoftTimeLimitExceeded(0.05)"
    assert bodies.all("cancelled") == ["slow: time limit"]


def test_past_the_hard_limit_the_slot_of_a_stubborn_body_is_free(
    worker: WorkerProcess, bodies: Bodies, events: Events
) -> None:
    task_id = send(pool_app.cling, "clings", time_limit=0.05)
    assert events.wait_for(task_id, "task-failed")["exception"] == "TimeLimitExceeded(0.05)"
    assert bodies.wait_for("cancelled", 1) == ["clings: time limit"]
    pool = stats(worker)
    assert (pool["active"], pool["leaving"]) == (0, 1)
    bodies.open_gate()
    bodies.wait_for("finished", 1)
    assert events.of(task_id).count("task-succeeded") == 0


def test_revoking_with_terminate_cancels_the_body(bodies: Bodies, events: Events) -> None:
    task_id = send(pool_app.hold, "unwanted")
    bodies.wait_for("started", 1)
    pool_app.app.control.revoke(task_id, terminate=True)
    assert events.wait_for(task_id, "task-revoked")["terminated"] is True
    assert bodies.wait_for("cancelled", 1) == ["unwanted: revoked"]


def test_one_message_delivered_twice_is_two_bodies(worker: WorkerProcess, bodies: Bodies) -> None:
    before = stats(worker)["finished"]
    for _ in range(2):
        send(pool_app.hold, "twin", task_id="job-1.1")
    assert bodies.wait_for("started", 2) == ["twin", "twin"]
    assert stats(worker)["active"] == 2
    bodies.open_gate()
    bodies.wait_for("finished", 2)
    wait_until(lambda: stats(worker)["finished"] == before + 2)


def test_stats_show_the_pool_and_its_loop(worker: WorkerProcess, bodies: Bodies) -> None:
    before = stats(worker)
    send(pool_app.hold, "one")
    bodies.wait_for("started", 1)
    pool = stats(worker)
    assert pool["implementation"] == "tests.workers.pool_app:ReportingPool"
    assert (pool["max-concurrency"], pool["processes"]) == (SLOTS, [worker.pid])
    assert (pool["active"], pool["waiting"], pool["leaving"]) == (1, 0, 0)
    assert pool["started"] == before["started"] + 1
    assert pool["tasks"] > before["tasks"]
    assert pool["loop"] == "uvloop"
    assert pool["loop_lag"] == {"max": 0.25}


def test_a_reset_of_the_broker_connection_repeats_and_loses_nothing(
    worker: WorkerProcess, bodies: Bodies, events: Events
) -> None:
    names = [str(n) for n in range(20)]
    ids = [send(pool_app.hold, name) for name in names]
    bodies.wait_for("started", len(names))
    wait_until(lambda: bodies.broker.hlen("unacked") == 0)
    kill_broker_connections(bodies)
    wait_until(lambda: worker.log.count("Connected to redis") == 2)
    bodies.open_gate()
    bodies.wait_for("finished", len(names))
    for task_id in ids:
        events.wait_for(task_id, "task-succeeded")
    assert sorted(bodies.all("started")) == sorted(bodies.all("finished")) == sorted(names)


def kill_broker_connections(bodies: Bodies) -> None:
    """Those of the worker; its bodies have their own connections."""
    clients = [client["id"] for client in bodies.broker.client_list() if client["name"] == QUEUE]
    assert clients
    for client_id in clients:
        bodies.broker.client_kill_filter(_id=client_id)

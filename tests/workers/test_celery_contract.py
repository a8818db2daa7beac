"""Undocumented behaviour of Celery and kombu that the asyncio pool relies on.

After an upgrade, a failing test names the change and the part of `workers/` to adapt.
"""

import asyncio
import gc
import inspect
import signal
import socket
from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import click
import pytest
from celery import Celery
from celery.apps.worker import Worker
from celery.bin.worker import WORKERS_POOL
from celery.concurrency.base import BasePool
from celery.exceptions import Terminated, WorkerShutdown, WorkerTerminate
from celery.worker import state
from celery.worker.consumer import Consumer
from celery.worker.consumer.tasks import Tasks
from celery.worker.request import Request, create_request_cls
from kombu import Message
from kombu.asynchronous.hub import Hub
from pydantic import BaseModel

from headpond.workers.asyncio_pool import AsyncioPool
from headpond.workers.delivery import Delivery, exception_info

ID = "job-7.1"


class Prompt(BaseModel):
    text: str


@pytest.fixture
def app() -> Celery:
    app = Celery("contract", broker="memory://", set_as_current=False)
    app.conf.update(task_acks_late=False, task_ignore_result=True)
    app.task(name="contract.work")(work)
    return app


async def work(a: int, b: int = 0) -> None: ...


class Recorder:
    """Stands in for the pool, the event dispatcher and the channel of a Request."""

    enabled = True

    def __init__(self) -> None:
        self.applied: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.events: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.result: Any = None

    def apply_async(self, *args: Any, **options: Any) -> Any:
        self.applied.append((args, options))
        return self.result

    def send(self, kind: str, **fields: Any) -> None:
        self.events.append({"type": kind, **fields})

    def terminate_job(self, pid: int, signal: int) -> None:
        self.calls.append("terminate_job")

    def terminate(self, signal: int) -> None:
        self.calls.append("terminate")

    def acknowledge(self, *_: object) -> None:
        self.calls.append("acknowledged")


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def request_(app: Celery, recorder: Recorder) -> Request:
    task = app.tasks["contract.work"]
    sent = app.amqp.as_task_v2(ID, "contract.work", (1,), {"b": 2})
    message = Message(
        body='[[1], {"b": 2}, {}]',
        content_type="application/json",
        content_encoding="utf-8",
        headers={**sent.headers, "timelimit": [30, 20]},
        properties=sent.properties,
        delivery_info={"exchange": "", "routing_key": "rollouts"},
        accept={"application/json"},
    )
    cls = create_request_cls(Request, task, recorder, "worker@here", recorder, app=app)
    return cls(message, on_ack=recorder.acknowledge, app=app, task=task, eventer=recorder, hostname="worker@here")


def test_celery_and_kombu_have_the_versions_that_the_pool_supports() -> None:
    installed = {name: version(name).rsplit(".", 1)[0] for name in ("celery", "kombu")}
    assert installed == {"celery": "5.7", "kombu": "5.7"}, "run the tests of this directory, then move the pins"


def test_worker_pool_is_honoured_when_no_pool_is_given_on_the_command_line(app: Celery) -> None:
    app.conf.worker_pool = "headpond.workers.asyncio_pool:AsyncioPool"
    context = click.Context(click.Command("worker"), obj=SimpleNamespace(app=app))
    assert WORKERS_POOL.convert("prefork", None, context) is AsyncioPool, (
        "`-P` left alone no longer yields to the setting worker_pool: workers/rollouts.py needs another setting"
    )


def test_a_request_hands_the_pool_its_decoded_arguments_limits_and_callbacks(
    request_: Request, recorder: Recorder
) -> None:
    request_.execute_using_pool(recorder)
    ((target,), options) = recorder.applied[0]
    name, task_id, headers = options["args"][:3]
    assert (name, task_id) == ("contract.work", ID), "apply_async: args no longer begin with the task's name and id"
    assert (headers["args"], headers["kwargs"]) == ([1], {"b": 2}), "apply_async: args[2] has no decoded arguments"
    assert headers["delivery_info"]["routing_key"] == "rollouts", "apply_async: args[2] no longer names the queue"
    assert (options["timeout"], options["soft_timeout"]) == (30, 20), "apply_async: the time limits have moved"
    assert options["accept_callback"] == request_.on_accepted, "apply_async: accept_callback is not on_accepted"
    assert options["callback"] == request_.on_success, "apply_async: callback is not on_success"
    inspect.signature(AsyncioPool.apply_async).bind(None, target, **options)


def test_a_request_keeps_the_delivery_by_weak_reference_only(request_: Request, recorder: Recorder) -> None:
    recorder.result = Recorder()
    request_.execute_using_pool(recorder)
    assert request_._apply_result() is recorder.result
    recorder.applied.clear()
    recorder.result = None
    gc.collect()
    assert request_._apply_result() is None, "Request now holds the delivery: the pool's own sets may be enough"


def test_acceptance_acknowledges_and_starts(request_: Request, recorder: Recorder) -> None:
    request_.on_accepted(1234, 0.0)
    assert recorder.calls == ["acknowledged"], "Request.on_accepted no longer acknowledges early"
    assert [event["type"] for event in recorder.events] == ["task-started"]
    assert request_ in state.active_requests, "Request.on_accepted no longer counts the task as active"


def test_success_is_a_tuple_of_zero_result_and_runtime(request_: Request, recorder: Recorder) -> None:
    request_.on_accepted(1234, 0.0)
    request_.on_success((0, None, 1.5))
    assert recorder.events[-1] == {"type": "task-succeeded", "uuid": ID, "result": None, "runtime": 1.5}
    assert request_ not in state.active_requests, "Request.on_success no longer ends the task's activity"


def test_failure_is_a_tuple_of_one_exception_info_and_runtime(request_: Request, recorder: Recorder) -> None:
    request_.on_accepted(1234, 0.0)
    request_.on_success((1, exception_info(ValueError("no")), 1.5))
    failed = recorder.events[-1]
    assert (failed["type"], failed["exception"]) == ("task-failed", "ValueError('no')"), (
        "Request.on_failure no longer shows ExceptionInfo.exception as the pool sets it"
    )
    assert request_ not in state.active_requests


def test_a_terminated_failure_is_a_revocation(request_: Request, recorder: Recorder) -> None:
    request_.on_accepted(1234, 0.0)
    request_.on_success((1, exception_info(Terminated("stopping")), 1.5))
    assert recorder.events[-1]["type"] == "task-revoked", "a job released by a stop is no longer shown as revoked"


def test_revoking_reaches_the_pool_then_the_delivery(request_: Request, recorder: Recorder) -> None:
    recorder.result = recorder
    request_.execute_using_pool(recorder)
    request_.on_accepted(1234, 0.0)
    request_.terminate(recorder, signal="TERM")
    assert recorder.calls == ["acknowledged", "terminate_job", "terminate"]
    assert recorder.events[-1]["type"] == "task-revoked"
    inspect.signature(Delivery.terminate).bind(None, signal.SIGTERM)


def test_a_delivery_revoked_before_its_acceptance_is_terminated_by_it(request_: Request, recorder: Recorder) -> None:
    recorder.result = recorder
    request_.execute_using_pool(recorder)
    request_.terminate(recorder, signal="TERM")
    recorder.calls.clear()
    request_.on_accepted(1234, 0.0)
    assert recorder.calls[-1] == "terminate", "on_accepted no longer terminates a delivery revoked while waiting"


def test_the_pool_overrides_hooks_that_exist() -> None:
    hooks = ["on_start", "on_stop", "on_terminate", "register_with_event_loop", "apply_async", "flush", "_get_info"]
    missing = [name for name in [*hooks, "terminate_job"] if not hasattr(BasePool, name)]
    assert not missing, f"BasePool no longer has {missing}"


def test_a_pool_is_active_between_start_and_close_and_stops_by_its_hooks(app: Celery) -> None:
    calls: list[str] = []

    class Pool(BasePool):
        def on_start(self) -> None:
            calls.append(f"start {self.active}")

        def on_stop(self) -> None:
            calls.append(f"stop {self.active}")

        def on_terminate(self) -> None:
            calls.append(f"terminate {self.active}")

    pool = Pool(4, app=app)
    pool.start()
    assert pool.active
    pool.close()
    pool.stop()
    pool.terminate()
    assert calls == ["start False", "stop False", "terminate False"], "BasePool's life cycle has changed"
    assert pool.num_processes == pool.limit == 4


def test_a_lost_connection_flushes_the_pool() -> None:
    flushed: list[bool] = []
    pool = SimpleNamespace(flush=lambda: flushed.append(True))
    Consumer.on_close(SimpleNamespace(controller=None, task_buckets={}, timer=None, pool=pool))
    assert flushed, "Consumer.on_close no longer calls pool.flush: after a reconnection, deliveries would run twice"


def test_without_prefetching_a_worker_takes_as_many_messages_as_the_pool_has_slots(redis_url: str) -> None:
    app = Celery("contract", broker=f"{redis_url}/2", set_as_current=False)
    app.conf.worker_disable_prefetch = True
    with app.connection_for_read() as connection:
        consumer: Any = SimpleNamespace(
            app=app,
            connection=connection,
            controller=SimpleNamespace(max_concurrency=None),
            pool=SimpleNamespace(num_processes=1),
            initial_prefetch_count=4,
            update_strategies=lambda: None,
            on_decode_error=None,
        )
        Tasks(consumer).start(consumer)
        can_consume: Callable[[], bool] = consumer.task_consumer.channel.qos.can_consume
        before = can_consume()
        reserved = Recorder()  # anything: they are only counted
        state.reserved_requests.add(reserved)
        assert (before, can_consume()) == (True, False), "worker_disable_prefetch no longer reads pool.num_processes"
        consumer.pool.num_processes = 2
        assert can_consume(), "worker_disable_prefetch no longer follows a pool that grows"
        state.reserved_requests.discard(reserved)


def test_a_coroutine_function_is_seen_through_the_pydantic_wrapper(app: Celery) -> None:
    async def complete(prompt: Prompt) -> str:
        return type(prompt).__name__

    task = app.task(name="contract.complete", pydantic=True)(complete)
    assert inspect.iscoroutinefunction(inspect.unwrap(task.run)), "pydantic=True no longer sets __wrapped__"
    result = task.run({"text": "hello"})
    assert inspect.iscoroutine(result), "pydantic=True no longer returns the coroutine"
    assert asyncio.run(result) == "Prompt"


def test_a_hub_forgets_its_readers_when_it_is_reset() -> None:
    hub, (ours, theirs) = Hub(), socket.socketpair()
    with ours, theirs:
        hub.add_reader(ours, lambda: None)
        hub.add_reader(ours, lambda: None)  # twice is allowed: a reconnection may fail before the reset
        hub.reset()
        assert not hub.readers, "Hub.reset keeps readers: HubCalls.register need not be repeated"


def test_calls_of_a_reader_run_before_the_next_poll_and_those_of_call_soon_after_it() -> None:
    hub, (ours, theirs) = Hub(), socket.socketpair()
    calls: list[str] = []
    with ours, theirs:
        hub.add_reader(ours, lambda: hub.call_soon(calls.append, "from a reader"))
        hub.call_soon(lambda: hub.call_soon(calls.append, "from call_soon"))
        theirs.send(b"x")  # stays readable: no poll blocks
        hub.run_once()
        assert calls == [], "call_soon now runs its calls before it polls: it can replace HubCalls"
        hub.run_once()
        assert set(calls) == {"from a reader", "from call_soon"}


def test_the_stop_flags_are_where_the_signal_handlers_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (state.should_stop, state.should_terminate) == (None, None), "celery.worker.state has other stop flags"
    monkeypatch.setattr(state, "should_stop", 0)
    with pytest.raises(WorkerShutdown):
        state.maybe_shutdown()
    monkeypatch.setattr(state, "should_terminate", 1)
    with pytest.raises(WorkerTerminate):
        state.maybe_shutdown()


def test_celery_installs_its_signal_handlers_before_the_pool_starts() -> None:
    assert "install_platform_tweaks" in inspect.getsource(Worker.on_start), (
        "Celery's handlers may now replace those of workers/stop_signals.py"
    )

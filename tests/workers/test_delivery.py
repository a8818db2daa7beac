import asyncio
import gc
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded, Terminated, TimeLimitExceeded
from support.waiting import wait_until_async

from headpond.errors import ConfigError
from headpond.workers.delivery import STOPPING, TIME_LIMIT, Delivery, exception_info

Report = tuple[BaseException | None, bool]


class Reports(list[Report]):
    def add(self, delivery: Delivery, error: BaseException | None, runtime_s: float, ended: bool) -> None:
        self.append((error, ended))


def new_delivery(
    run: Callable[..., Any], reports: Reports, *, soft_s: float | None = None, hard_s: float | None = None
) -> Delivery:
    return Delivery(
        name="tests.work",
        id="job-1.1",
        run=run,
        request={"args": [], "kwargs": {}, "delivery_info": {"routing_key": "rollouts"}},
        soft_s=soft_s,
        hard_s=hard_s,
        on_accepted=lambda pid, time_s: None,
        on_outcome=lambda outcome: None,
        on_revoked=lambda delivery: None,
        report=reports.add,
    )


def on_a_loop(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


async def until_ended(reports: Reports) -> None:
    await wait_until_async(lambda: any(ended for _, ended in reports))


def test_a_body_that_returns_is_reported_without_error() -> None:
    async def body() -> None: ...

    async def scenario() -> None:
        reports = Reports()
        new_delivery(body, reports).start()
        await until_ended(reports)
        assert reports == [(None, True)]

    on_a_loop(scenario)


def test_a_plain_function_is_refused() -> None:
    called: list[bool] = []

    async def scenario() -> None:
        reports = Reports()
        new_delivery(lambda: called.append(True), reports).start()
        await until_ended(reports)
        assert isinstance(reports[0][0], ConfigError)
        assert not called

    on_a_loop(scenario)


def test_a_delivery_cancelled_before_its_first_step_is_reported() -> None:
    async def body() -> None: ...

    async def scenario() -> None:
        reports = Reports()
        delivery = new_delivery(body, reports)
        delivery.start()
        delivery.cancel(STOPPING)
        await until_ended(reports)
        assert isinstance(reports[0][0], Terminated)

    on_a_loop(scenario)


def test_a_body_may_clean_up_past_both_limits_even_if_the_loop_was_blocked_past_both() -> None:
    cancellations: list[object] = []
    cleaned_up = asyncio.Event()

    async def body() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as stop:
            cancellations.append(stop.args[0])
            try:
                await cleaned_up.wait()
            except asyncio.CancelledError:
                cancellations.append("hard limit")
                await cleaned_up.wait()
            raise

    async def scenario() -> None:
        reports = Reports()
        new_delivery(body, reports, soft_s=0.001, hard_s=0.02).start()
        await asyncio.sleep(0)
        time.sleep(0.03)  # noqa: ASYNC251 - blocks on purpose
        await wait_until_async(lambda: reports)
        assert isinstance(reports[0][0], TimeLimitExceeded)
        cleaned_up.set()
        await until_ended(reports)
        assert isinstance(reports[1][0], SoftTimeLimitExceeded)
        assert cancellations == [TIME_LIMIT, "hard limit"]

    on_a_loop(scenario)


def test_the_soft_limit_does_not_cancel_the_clean_up_of_a_cancelled_body() -> None:
    interrupted: list[bool] = []

    async def body() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                interrupted.append(True)
            raise

    async def scenario() -> None:
        reports = Reports()
        delivery = new_delivery(body, reports, soft_s=0.005)
        delivery.start()
        await asyncio.sleep(0)
        delivery.cancel(STOPPING)
        await until_ended(reports)
        assert isinstance(reports[0][0], Terminated)
        assert not interrupted

    on_a_loop(scenario)


def test_a_reported_error_keeps_no_locals_of_the_body_alive() -> None:
    class Payload:
        pass

    payloads: list[weakref.ref[Payload]] = []

    async def body() -> None:
        payload = Payload()
        payloads.append(weakref.ref(payload))
        raise ValueError("no")

    async def scenario() -> None:
        reports = Reports()
        new_delivery(body, reports).start()
        await until_ended(reports)
        error = reports.pop()[0]
        assert error is not None
        assert "ValueError: no" in str(exception_info(error).traceback)

    gc.disable()
    try:
        on_a_loop(scenario)
        assert payloads[0]() is None
    finally:
        gc.enable()

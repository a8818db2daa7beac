"""One delivery of a task message, and its body on the event loop: time limits, cancellation, outcome.

A message delivered twice is two deliveries. Everything but `terminate` runs on the loop thread; results go to
`report`. A body is cancelled with the reason as the message of its CancelledError.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from inspect import iscoroutinefunction, unwrap
from typing import Any

from billiard.einfo import ExceptionInfo
from celery.exceptions import SoftTimeLimitExceeded, Terminated, TimeLimitExceeded

from headpond.errors import ConfigError, StageError
from headpond.tasks.agreement import headers

STOPPING, REVOKED, TIME_LIMIT = "stopping", "revoked", "time limit"


@dataclass(kw_only=True, eq=False, slots=True, weakref_slot=True)
class Delivery:
    """The pool must keep a reference: Celery's Request has a weak one only."""

    name: str
    id: str
    run: Callable[..., Any]
    request: dict[str, Any]  # The message's headers, with the decoded arguments.
    soft_s: float | None
    hard_s: float | None
    on_accepted: Callable[[int, float], None]
    on_outcome: Callable[[tuple[int, ExceptionInfo | None, float]], None]
    on_revoked: "Callable[[Delivery], None]"
    # Error, runtime in seconds, and whether the body has ended: past the hard limit it may
    # not have.
    report: "Callable[[Delivery, BaseException | None, float, bool], None]"
    _body: "asyncio.Task[None] | None" = None
    _cancelled_for: str | None = None
    _timer: asyncio.TimerHandle | None = None  # Timer of the next limit.

    def terminate(self, signal: int | None = None) -> None:
        """Called by the Request, on the hub thread, after it has sent the event that the task is revoked."""
        self.on_revoked(self)

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        started_s = time.monotonic()
        self._body = loop.create_task(self._run(), name=self.id)
        if self.soft_s:
            self._timer = loop.call_later(self.soft_s, self._pass_soft_limit, self.soft_s)
        elif self.hard_s:
            self._timer = loop.call_later(self.hard_s, self._pass_hard_limit, self.hard_s)
        self._body.add_done_callback(lambda body: self._end(body, time.monotonic() - started_s))

    def cancel(self, reason: str) -> None:
        if self._body is not None:  # else it has ended, or was revoked before it started
            self._cancelled_for = reason
            self._body.cancel(reason)

    async def _run(self) -> None:
        if not _is_async(self.run):
            queue = self.request["delivery_info"]["routing_key"]
            raise ConfigError(
                f"{self.name} is not an `async def`, and queue {queue} is served by the asyncio pool, which runs "
                "coroutines only. Route it to a queue of the compute workers, or make it a coroutine."
            )
        headers.set(self.request)
        try:
            await self.run(*self.request["args"], **self.request["kwargs"])
        except (SystemExit, KeyboardInterrupt) as error:
            raise StageError(f"{self.name} tried to end the process: {error!r}") from error

    def _pass_soft_limit(self, limit_s: float) -> None:
        if self._cancelled_for is None:  # else it is cleaning up, which must not be cancelled
            self.cancel(TIME_LIMIT)
        if self.hard_s:
            # Counted from here: a loop blocked past both limits would merge the two cancellations into one.
            left_s = max(0.0, self.hard_s - limit_s)
            self._timer = asyncio.get_running_loop().call_later(left_s, self._pass_hard_limit, self.hard_s)

    def _pass_hard_limit(self, limit_s: float) -> None:
        self.cancel(TIME_LIMIT)
        self.report(self, TimeLimitExceeded(limit_s), limit_s, False)

    def _end(self, body: "asyncio.Task[None]", runtime_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._body = None  # its error's traceback refers to this delivery: a cycle would keep the body's locals
        self.report(self, self._cancellation() if body.cancelled() else body.exception(), runtime_s, True)

    def _cancellation(self) -> BaseException:
        if self._cancelled_for == TIME_LIMIT:
            return SoftTimeLimitExceeded(self.soft_s)
        if self._cancelled_for is not None:
            return Terminated(self._cancelled_for)
        return asyncio.CancelledError("the body cancelled itself")


@cache
def _is_async(run: Callable[..., Any]) -> bool:
    return iscoroutinefunction(unwrap(run))  # `pydantic=True` wraps the coroutine function in a plain one


def exception_info(error: BaseException) -> ExceptionInfo:
    """Build the information that Celery's tracer passes to the Request."""
    if error.__traceback__ is None:  # ExceptionInfo needs one, and an exception that was never raised has none
        _raise_and_catch(error)
    info = ExceptionInfo((type(error), error, error.__traceback__))
    info.exception = error  # pyright: ignore[reportAttributeAccessIssue]  # typed by its first value
    return info


def _raise_and_catch(error: BaseException) -> None:
    try:
        raise error
    except type(error):
        return
    finally:
        del error  # the traceback now refers to this frame: the same cycle

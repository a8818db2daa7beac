"""A Celery app for real workers under test: `celery -A tests.workers.pool_app worker`.

Its bodies report through Redis, and wait there until the test opens the gate.
"""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from celery import Celery
from pydantic import BaseModel
from redis.asyncio import BlockingConnectionPool, Redis

from headpond.errors import ConfigError
from headpond.workers import celery_changes
from headpond.workers.asyncio_pool import AsyncioPool

# Database 0 is the broker's; the bodies report to 1, so that a test can empty it.
REDIS_URL = os.environ.get("POOL_APP_REDIS", "redis://127.0.0.1:6379")
GATE_POLL_S = 0.02

app = Celery("pool_app", broker=f"{REDIS_URL}/0")
app.conf.update(
    worker_pool="tests.workers.pool_app:ReportingPool",
    task_acks_late=False,
    task_ignore_result=True,
    worker_disable_prefetch="POOL_APP_PREFETCH" not in os.environ,
    worker_send_task_events=True,
    accept_content=["json"],
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=4,
    broker_transport_options={"client_name": os.environ.get("POOL_APP_CLIENT", "tests"), "ack_emulation": False},
)
app.steps["consumer"].add(celery_changes.EventBatches)


class Order(BaseModel):
    name: str
    count: int


class ReportingPool(AsyncioPool):
    drain_s = float(os.environ.get("POOL_APP_DRAIN_S", "600"))
    release_s = float(os.environ.get("POOL_APP_RELEASE_S", "60"))
    redis: Redis
    gate: asyncio.Event

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None]:
        if os.environ.get("POOL_APP_LIFESPAN") == "fails":
            raise ConfigError("no store at /nowhere: set HEADPOND_STORE")
        # With a time-out redis-py sends through asyncio.wait_for, which swallows cancellations on Python 3.11.
        connections = BlockingConnectionPool.from_url(
            f"{REDIS_URL}/1", max_connections=16, decode_responses=True, socket_timeout=None
        )
        async with Redis(connection_pool=connections) as ReportingPool.redis, asyncio.TaskGroup() as background:
            ReportingPool.gate = asyncio.Event()
            await self.redis.rpush("lifespan", "entering")
            if os.environ.get("POOL_APP_LIFESPAN") == "hangs":
                await self.gate.wait()
            watcher = background.create_task(self._watch_gate())
            yield
            ended = await self.redis.llen("finished") + await self.redis.llen("cancelled")
            await self.redis.rpush("lifespan", f"left after {ended} bodies")
            watcher.cancel()

    async def _watch_gate(self) -> None:
        while True:
            if await self.redis.exists("broken"):
                raise ConfigError("the background of the lifespan broke")
            is_open = await self.redis.exists("gate")
            self.gate.set() if is_open else self.gate.clear()
            await self.redis.set("gate_is", "open" if is_open else "closed")
            await asyncio.sleep(GATE_POLL_S)

    def loop_lag(self) -> dict[str, float]:
        return {"max": 0.25}


@app.task(name="pool_app.hold")
async def hold(name: str) -> None:
    """Run until the test opens the gate, and report the end."""
    redis = ReportingPool.redis
    await redis.sadd("running", name)
    await redis.rpush("counts", await redis.scard("running"))
    await redis.rpush("started", name)
    try:
        await ReportingPool.gate.wait()
    except asyncio.CancelledError as stop:
        await redis.rpush("cancelled", f"{name}: {stop.args[0]}")
        raise
    finally:
        await redis.srem("running", name)
    await redis.rpush("finished", name)


@app.task(name="pool_app.cling")
async def cling(name: str) -> None:
    """Run until the gate opens, ignoring cancellation."""
    redis = ReportingPool.redis
    await redis.rpush("started", name)
    while not ReportingPool.gate.is_set():
        try:
            await ReportingPool.gate.wait()
        except asyncio.CancelledError as stop:
            await redis.rpush("cancelled", f"{name}: {stop.args[0]}")
    await redis.rpush("finished", name)


@app.task(name="pool_app.order", pydantic=True)
async def order(order: Order) -> None:
    await ReportingPool.redis.rpush("ordered", f"{type(order).__name__} {order.name} {order.count}")


@app.task(name="pool_app.fail")
async def fail(secret: str) -> None:
    raise ValueError("the engine refused")


@app.task(name="pool_app.exit")
async def leave() -> None:
    raise SystemExit(3)


@app.task(name="pool_app.exit_in_child")
async def leave_in_child() -> None:
    async with asyncio.TaskGroup() as children:
        children.create_task(leave.run())


@app.task(name="pool_app.cancel_itself")
async def cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


@app.task(name="pool_app.plain")
def plain() -> None:
    """Not a coroutine: belongs to another worker."""


@app.task(name="pool_app.nothing")
async def nothing() -> None: ...

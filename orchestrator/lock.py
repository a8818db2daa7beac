"""One orchestrator per run, one run per Redis database: a lock file, and a lock in Redis that holds an epoch."""

import asyncio
import fcntl
import logging
import os
import socket
import time
from pathlib import Path
from typing import IO, Any

import orjson

from headpond.broker import redis_keys
from headpond.errors import RunLocked
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.orchestrator.run_dir import explained

logger = logging.getLogger("headpond.lock")

TTL_S = 10
RENEW_S = 2.0
# Takes or renews the lock if it is free, ours, or held by ARGV[3]; returns the holder.
HOLD = """
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] and held ~= ARGV[3] then return held end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return ARGV[1]
"""
RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class RunLock:
    def __init__(self, run_dir: Path, broker: Broker, *, run: str, epoch: int) -> None:
        self._broker = broker
        self._run = run
        self._value = orjson.dumps(
            {"run": run, "epoch": epoch, "host": socket.gethostname(), "pid": os.getpid(), "run_dir": str(run_dir)}
        )

    async def acquire(self) -> None:
        """Waits until the lock of a dead holder expires; raises RunLocked if the holder renews it."""
        last_ttl_ms = None
        while (holder := await self._hold()) != self._value:
            lock: dict[str, Any] = orjson.loads(holder)
            # A lock of this run from this host: this process holds the lock file, so the holder is dead.
            if lock["run"] == self._run and lock["host"] == socket.gethostname():
                await self._hold(instead_of=holder)
                continue
            ttl_ms = await self._broker.call(lambda client: client.pttl(redis_keys.LOCK))
            if last_ttl_ms is not None and ttl_ms > last_ttl_ms:
                raise RunLocked(f"this Redis database is in use: {describe(holder)}. One run per database: "
                                "put another number at the end of the Redis URL, or stop that run")  # fmt: skip
            last_ttl_ms = ttl_ms
            logger.info("action=lock_awaited expires_in_s=%.1f holder=%s", ttl_ms / 1000, describe(holder))
            await asyncio.sleep(1)

    async def check(self) -> None:
        """Renew the lock, also after a flush of Redis. RunLocked if another process has it."""
        holder = await self._hold()
        if holder != self._value:
            raise RunLocked(f"another orchestrator has taken over: {describe(holder)}; this one stops writing")

    async def release(self) -> None:
        await self._broker.call(lambda client: client.eval(RELEASE, 1, redis_keys.LOCK, self._value))

    async def _hold(self, instead_of: bytes = b"") -> bytes:
        return await self._broker.call(
            lambda client: client.eval(HOLD, 1, redis_keys.LOCK, self._value, TTL_S, instead_of)  # pyright: ignore[reportReturnType]
        )


def describe(holder: bytes) -> str:
    held: dict[str, Any] = orjson.loads(holder)
    return f"run {held['run']} in {held['run_dir']}, process {held['pid']} on {held['host']}"


def lock_directory(run_dir: Path) -> IO[str]:
    """Lock the run directory until the file is closed or the process ends."""
    with explained(run_dir):
        file = (run_dir / "lock").open("a+")
    deadline = time.monotonic() + 1
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.seek(0)
                holder = file.read().strip() or "another process"
                file.close()
                raise RunLocked(f"{run_dir} is in use by {holder}: stop it first, or use another run_dir") from None
            time.sleep(0.05)
    with explained(run_dir):
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    return file

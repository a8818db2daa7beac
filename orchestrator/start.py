"""From a configuration to a running orchestrator, and from any end of it back to an exit that says why."""

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import Awaitable
from typing import Any

from orchestrator import crash_points, run_dir
from orchestrator.broker import Broker
from orchestrator.ending import Stopping
from orchestrator.ledger import rebuild
from orchestrator.ledger.ledger import Ledger
from orchestrator.lock import RunLock, lock_directory
from orchestrator.loop import Orchestrator
from orchestrator.reporting import endpoint
from orchestrator.reporting.reporter import Watch, nobody
from penstock.config import RunConfig, test_hooks
from penstock.errors import ConfigError, PenstockError, RunLocked
from penstock.ledger import schema
from penstock.runtime import stacks
from penstock.runtime.event_loop import event_loop_factory
from penstock.runtime.loop_lag import redis_publisher

logger = logging.getLogger("penstock.orchestrator")

LEAVE_S = 3.0
IO_CONCURRENCY = 8  # plans, manifests and the status file: a handful of small files at once


def run(config: RunConfig, *, watch: Watch = nobody) -> dict[str, Any]:
    """Drive the run to its end, or to where somebody stops it; returns its last status."""
    crash_points.arm(test_hooks.crash_at(config))
    if not config.environments:
        raise ConfigError('no environment to play: configure [environments.NAME] with use = "..."')
    # The imports made 90,000 objects that stay: a full collection looked at each, for 55 ms of the loop.
    gc.freeze()
    schema.refuse_network_file_system(config.ledger_path.parent)
    run_dir.make(config)
    with (
        lock_directory(config.run_dir),
        endpoint.listening(config.http) as listener,  # a port that is taken is told before anything begins
        asyncio.Runner(loop_factory=event_loop_factory(concurrency=IO_CONCURRENCY)) as runner,
    ):
        return runner.run(_run(config, run_dir.enter(config), watch, listener))


async def _run(config: RunConfig, run: str, watch: Watch, listener: socket.socket | None) -> dict[str, Any]:
    stacks.show_on_signal(asyncio.get_running_loop())
    broker = Broker(config.redis_url)
    await broker.start(patience_s=config.recovery.redis_patience_s)
    rebuild.if_lost(config)
    ledger = Ledger(config.ledger_path)
    try:
        lock = RunLock(config.run_dir.resolve(), broker, run=run, epoch=ledger.count("epoch"))
        await lock.acquire()
        stopping = Stopping()
        stopping.listen()  # until here there is nothing to finish: Ctrl-C just ends the process
        try:
            lag, url = config.lag.watch("orchestrator", redis_publisher(broker.client)), endpoint.url(listener)
            orchestrator = Orchestrator(
                config, run=run, ledger=ledger, broker=broker, lock=lock, lag=lag, stopping=stopping, watch=watch,
                url=url,
            )  # fmt: skip
            async with endpoint.serving(listener, orchestrator):
                await _drive(orchestrator)
            return orchestrator.reporter.status()
        finally:
            await _within(LEAVE_S, ledger.committed())
            await _within(LEAVE_S, lock.release())
    finally:
        ledger.close()
        await broker.close()


async def _drive(orchestrator: Orchestrator) -> None:
    """An error that ends the run is the last thing in its status, unless the run is somebody else's by now."""
    try:
        await orchestrator.run()
    except BaseExceptionGroup as group:
        error = _cause(group)
        if not isinstance(error, RunLocked):
            await orchestrator.reporter.write(stopped_by=f"{error}")
        raise error from group


async def _within(seconds: float, parting: Awaitable[None]) -> None:
    """A disk or a Redis that is away must not keep the process: both are safe to leave as they are."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await parting


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error that ended the duties: ours before foreign ones."""
    found = [_cause(error) if isinstance(error, BaseExceptionGroup) else error for error in group.exceptions]
    return next((error for error in found if isinstance(error, PenstockError)), found[0])

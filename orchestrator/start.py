"""Starts an orchestrator from a configuration; the error that ends a run is raised and written to its last status."""

import asyncio
import contextlib
import faulthandler
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Sequence

from headpond.config import RunConfig, named_rules
from headpond.errors import BatchError, ConfigError, HeadpondError, RunLocked
from headpond.event_loop import garbage
from headpond.event_loop.factory import event_loop_factory
from headpond.event_loop.lag_summaries import redis_publisher
from headpond.ledger import schema
from headpond.orchestrator import run_dir
from headpond.orchestrator.components import PROCESS
from headpond.orchestrator.duties.housekeeping import Troubles
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.orchestrator.ledger import rebuild
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.lock import RunLock, lock_directory
from headpond.orchestrator.loop import Orchestrator
from headpond.orchestrator.release import releasable
from headpond.orchestrator.reporting import endpoint
from headpond.orchestrator.reporting.reporter import StatusCallback, ignore_status
from headpond.orchestrator.shutdown import StopRequests
from headpond.orchestrator.trainer import trainer_state
from headpond.orchestrator.workforce import attendance
from headpond.records.status import Status

logger = logging.getLogger("headpond.orchestrator")

LEAVE_S = 3.0  # for the last commit, and for releasing the lock
IO_CONCURRENCY = 8  # plans, manifests and the status file: a handful of small files at once


def run(
    config: RunConfig, *, on_status: StatusCallback = ignore_status, engine_check: Sequence[str] | None = None
) -> Status:
    """Drive the run until it is done or stopped; returns its last status. `engine_check`: the command that examines the
    engine before the first rollout."""
    if not config.environments:
        raise ConfigError('no environment to play: configure [environments.NAME] with use = "..."')
    batch_phase = named_rules.check_rules(config)
    schema.refuse_network_file_system(config.ledger_path.parent)
    run_dir.create_directories(config)
    with (
        lock_directory(config.run_dir),
        endpoint.listening(config.http) as listener,  # before the run starts: an error may be a port in use
        asyncio.Runner(loop_factory=event_loop_factory(concurrency=IO_CONCURRENCY)) as runner,
    ):
        run = run_dir.begin_or_resume(config)
        return runner.run(_run(config, run, on_status, listener, batch_phase=batch_phase, engine_check=engine_check))


@garbage.aging_collection()  # by Python's own rule, a collection with 160,000 open rollouts blocks the loop for 145 ms
async def _run(
    config: RunConfig,
    run: str,
    on_status: StatusCallback,
    listener: socket.socket | None,
    *,
    batch_phase: bool,
    engine_check: Sequence[str] | None,
) -> Status:
    # `kill -USR1 PID` prints the stacks of threads at once, and of tasks when the loop runs again.
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _show_tasks)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)
    troubles = Troubles()
    broker = Broker(config.redis_url, troubles)
    await broker.connect(patience_s=config.recovery.redis_patience_s)
    rebuild.rebuild_if_lost(config, lambda: _releasable(config))
    ledger = Ledger(config.ledger_path, keep_events_steps=config.trainer.keep_events_steps, troubles=troubles)
    try:
        ledger.state.epoch += 1
        lock = RunLock(config.run_dir.resolve(), broker, run=run, epoch=ledger.state.epoch)
        await lock.acquire()
        stop = StopRequests()
        stop.listen()  # before this there is nothing to finish, and Ctrl-C ends the process
        try:
            orchestrator = Orchestrator(
                config,
                run=run,
                ledger=ledger,
                broker=broker,
                lock=lock,
                lag=config.lag.watch(PROCESS, redis_publisher(broker.client)),
                stop=stop,
                on_status=on_status,
                troubles=troubles,
                http_url=endpoint.url(listener),
                batch_phase=batch_phase,
                engine_check=engine_check,
            )
            async with endpoint.serving(listener, orchestrator):
                await _drive(orchestrator)
            return orchestrator.reporter.status()
        finally:
            await _within(LEAVE_S, ledger.committed())
            await _within(LEAVE_S, attendance.leave(broker))
            await _within(LEAVE_S, lock.release())
    finally:
        ledger.close()
        await broker.close()


def _releasable(config: RunConfig) -> dict[str, int]:
    """Nothing while the trainer's files cannot be read: what was released is then released again."""
    try:
        return releasable(config.trainer, trainer_state(config))
    except (BatchError, OSError):
        return {}


async def _drive(orchestrator: Orchestrator) -> None:
    """Write the error that ends the run into its last status, unless another orchestrator holds the run by now."""
    try:
        await orchestrator.run()
    except BaseExceptionGroup as group:
        error = _cause(group)
        if not isinstance(error, RunLocked):
            await orchestrator.reporter.write(stopped_by=f"{error}")
            await orchestrator.trainer.write_status(f"the run has stopped: {error}")
        raise error from group


async def _within(seconds: float, work: Awaitable[None]) -> None:
    """Give up after `seconds`, so that the process ends even if a disk is full or Redis is down. Nothing is lost."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error that ended the duties: a HeadpondError if there is one."""
    errors = [_cause(error) if isinstance(error, BaseExceptionGroup) else error for error in group.exceptions]
    return next((error for error in errors if isinstance(error, HeadpondError)), errors[0])


def _show_tasks() -> None:
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.stderr)
    sys.stderr.flush()

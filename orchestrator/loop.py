"""The orchestrator: a few duties on one event loop, which share the ledger and nothing else.

    drive          plan groups, form steps, submit what waits, seal what is encoded
    read_replies   apply what the workers answered, commit, trim the stream
    reconcile      find what was lost and have it submitted again
    report         say what is happening, every second
    metrics        write down what every delivered step was like
    lags           know how late the other processes' loops run
    heed_trainer   take in acknowledgements and policy versions, let go of blobs
    sweep          remove files that nobody names
    lock.keep      stay the only one

`drive` sleeps until a reply, a loss or half a second wakes it. A duty that raises ends them all.
"""

import asyncio
import logging

from orchestrator import crash_points, release, sealing
from orchestrator.broker import Broker
from orchestrator.composer import Composer
from orchestrator.ending import Ending, Phase, Stopping
from orchestrator.gates import Gates
from orchestrator.groups import Groups
from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.records import BatchRecord
from orchestrator.lock import RunLock
from orchestrator.planner import Planner
from orchestrator.reconciler import Reconciler
from orchestrator.release import Release
from orchestrator.reply_stream import AT_ONCE, ReplyStream
from orchestrator.reporting.lags import Lags
from orchestrator.reporting.metrics import Metrics
from orchestrator.reporting.reporter import Reporter, Watch
from orchestrator.slices import spaced
from orchestrator.submission import Submitter
from orchestrator.trainer import Trainer
from penstock import redis_keys
from penstock.batches import EncodedRank, read_manifest
from penstock.config import RunConfig
from penstock.runtime.loop_lag import LoopLag
from penstock.store import Store

logger = logging.getLogger("penstock.orchestrator")

WAKE_S = 0.5
GATHER_S = 0.01  # six replies at a time, as they came, cost a third more CPU: each time is three questions and a commit
TRAINER_S = 0.25  # how soon a trainer's word is heard
CATCH_UP_S = 5.0  # replies that take longer than this to apply: the losses are looked for in the next round


class Orchestrator:
    def __init__(
        self,
        config: RunConfig,
        *,
        run: str,
        ledger: Ledger,
        broker: Broker,
        lock: RunLock,
        lag: LoopLag,
        stopping: Stopping,
        watch: Watch,
        url: str | None = None,
    ) -> None:
        self.config = config
        self.run_id = run
        self.ledger = ledger
        self.broker = broker
        self.lock = lock
        self.lag = lag
        self.stopping = stopping
        self.url = url
        """where others may ask: the HTTP endpoint's"""
        self.gates = Gates()
        self.store = Store(config.store_dir)
        self.stages = Groups(config, ledger, self.gates)
        self.trainer = Trainer(config, ledger)
        self.planner = Planner(config, ledger, self.trainer)
        self.composer = Composer(config, ledger, self.trainer)
        self.release = Release(config, ledger, self.trainer)
        self.sweeper = release.Sweep(config, run, ledger)
        self.sealer = sealing.Sealer(config)
        self.submitter = Submitter(config, run, ledger, broker, self.gates)
        self.replies = ReplyStream(run, broker, ledger)
        self.reconciler = Reconciler(config, run, ledger, broker, self.stages)
        self.ending = Ending(config, run, ledger, broker, self.replies)
        self.lags = Lags(broker)
        self.metrics = Metrics(config, ledger, lag, self.lags)
        self.reporter = Reporter(self, watch)
        self.changed = asyncio.Event()

    async def run(self) -> None:
        """Until the last step is delivered, or somebody stops it; what is open then waits in the ledger."""
        self.deliver_what_is_sealed()
        self.composer.resume()
        duties = [self.lag.run, self.lags.run, self.lock.keep, self.reporter.run, self.metrics.run, self.read_replies,
                  self.reconcile, self.heed_trainer, self.sweep]  # fmt: skip
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(duty()) for duty in duties]
            await self.stopping.unless_stopped(self.drive_to_rest())
            for task in tasks:
                task.cancel()
        await self.metrics.write()
        await self.reporter.write()
        await self.trainer.tell("the run is complete" if self.done else "the orchestrator was stopped", ended=self.done)

    async def drive_to_rest(self) -> None:
        await self.drive()
        if self.done:
            await self.ending.finish()
            await self.trainer.look()
            await self.release.run_once()
            await self.sweeper.run_once()
        else:
            await self.ending.drain()

    @property
    def done(self) -> bool:
        return self.ledger.number("steps_delivered") >= self.config.steps

    async def drive(self) -> None:
        self.planner.survey()
        while self.stopping.phase is Phase.RUNNING and not self.done:
            more_to_plan = self.planner.plan()
            crash_points.passed("planned")
            if self.composer.compose():
                self.metrics.composed()
                await self.ledger.committed()
                crash_points.passed("composed")
            await self.submitter.submit(list(self.ledger.waiting.values()))
            encoded = self.composer.encoded()
            sealed = encoded is not None and await self.seal(*encoded)
            if not sealed and not more_to_plan:
                await self.wait_for_change()

    async def wait_for_change(self) -> None:
        try:
            async with asyncio.timeout(WAKE_S):
                await self.changed.wait()
        except TimeoutError:
            pass
        self.changed.clear()

    async def seal(self, batch: BatchRecord, ranks: list[EncodedRank]) -> bool:
        crash_points.passed("encoded")
        await self.lock.check()
        if not await self.sealer.seal(batch, ranks):
            return False
        crash_points.passed("sealed")
        rollouts = sum(1 for _ in batch.rollouts())
        self.deliver(batch)
        await self.ledger.committed()
        crash_points.passed("delivered")
        logger.info("action=delivered step=%d rollouts=%d", batch.step, rollouts)
        return True

    def deliver_what_is_sealed(self) -> None:
        """The manifest on the disk is the truth: a crash may have kept the ledger from saying so."""
        for batch in list(self.ledger.batches.values()):
            if manifest := read_manifest(self.store, batch.step):
                self.sealer.publish(manifest)
                self.deliver(batch)

    def deliver(self, batch: BatchRecord) -> None:
        self.metrics.measure(batch)
        self.ledger.deliver(batch)

    async def read_replies(self) -> None:
        while True:
            entries = await self.replies.read()
            if not entries:
                continue
            crash_points.passed("replies_read")
            async for some in spaced(entries):
                for reply in filter(None, map(self.replies.take, some)):
                    self.stages.apply(reply)
            self.changed.set()
            await self.ledger.committed()
            crash_points.passed("replies_committed")
            await self.replies.trim()
            if len(entries) < AT_ONCE:
                await asyncio.sleep(GATHER_S)

    async def heed_trainer(self) -> None:
        while True:
            before = self.trainer.state
            await self.trainer.look()
            await self.ledger.committed()
            await self.release.run_once()
            await self.trainer.tell("; ".join(self.reporter.waiting_for()) or "rollouts are being generated")
            if self.trainer.state != before:
                self.changed.set()
            await asyncio.sleep(TRAINER_S)

    async def sweep(self) -> None:
        while True:
            await self.sweeper.run_once()
            await asyncio.sleep(release.EVERY_S)

    async def reconcile(self) -> None:
        while True:
            await asyncio.sleep(self.reconciler.poll_s)
            seen = await self.reconciler.look()
            if not await self.caught_up_with(await self.replies.newest()):
                continue
            findings = self.reconciler.judge(seen)
            self.changed.set()
            await self.ledger.committed()
            if expired := findings.expired_leases:
                await self.broker.ask(lambda client, expired=expired: client.hdel(redis_keys.LEASES, *expired))
            cancelled, self.stages.cancelled = self.stages.cancelled, []
            if revoke := findings.revoke + [job.task_id(self.run_id) for job in cancelled]:
                await self.ending.revoke(revoke)

    async def caught_up_with(self, reply_id: str) -> bool:
        try:
            async with asyncio.timeout(CATCH_UP_S):
                while self.replies.behind(reply_id):
                    await asyncio.sleep(0.01)
        except TimeoutError:
            return False
        return True

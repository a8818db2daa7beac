"""The orchestrator: duties on one event loop that share the ledger. In the order of a rollout through the run:

    drive           plan groups, compose steps, submit waiting jobs, seal encoded steps
    read_replies    apply the workers' replies to their groups, commit, trim the stream
    reconcile       find lost jobs and have them submitted again
    follow_trainer  read acknowledgements and policy versions, release blobs

`duties` lists the others. `drive` sleeps until a reply, a loss, the trainer or half a second wakes it. A duty that
raises ends them all. `components.py` constructs what the duties use.
"""

import asyncio
import logging
from collections.abc import Coroutine

from headpond.batches import EncodedRank, read_manifest
from headpond.errors import OtherPlan
from headpond.event_loop.offload import in_io_thread
from headpond.orchestrator import lock, release
from headpond.orchestrator.components import Components
from headpond.orchestrator.duties import crash_points
from headpond.orchestrator.duties.slices import in_slices, repeat
from headpond.orchestrator.exchange.reply_stream import AT_ONCE
from headpond.orchestrator.ledger.rows import BatchRecord
from headpond.orchestrator.reporting import metrics, reporter
from headpond.orchestrator.workforce.leases import remove_leases

logger = logging.getLogger("headpond.orchestrator")

WAKE_S = 0.5
GATHER_S = 0.01  # gathers replies for one commit: handling six at a time as they arrive costs a third more CPU
TRAINER_POLL_S = 0.25
STALL_POLL_S = 1.0
RETRY_REQUESTS_POLL_S = 2.0
CATCH_UP_S = 5.0  # when applying the replies takes longer than this, losses are judged in the next round


class Orchestrator(Components):
    async def run(self) -> None:
        """Drive the run until the last step is delivered or a stop is requested; open work then waits in the ledger."""
        if not self.phase.done:  # else the trainer of a finished run, whose `steps` were raised, sees its end
            await self.trainer.write_status("the run is starting")
        await self.deliver_sealed_steps()
        self.composer.resume()
        self.planner.resume()
        self.evaluations.resume()
        await self.submitter.remove_leftovers()
        await self.shutdown.resume()
        await self.attendance.exchange()
        async with self.sinks.sending():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(duty) for duty in self.duties()]
                await self.stop.run_unless_stopped(self.drive_and_shut_down())
                for task in tasks:
                    task.cancel()
            await self.metrics.write()
        await self.reporter.write()
        why = (self.phase.out_of_data or "the run is complete") if self.phase.done else "the orchestrator was stopped"
        await self.trainer.write_status(why, ended=self.phase.done)

    def duties(self) -> list[Coroutine[None, None, None]]:
        return [
            self.read_replies(),
            self.reconcile(),
            repeat(self.follow_trainer, TRAINER_POLL_S),
            repeat(self.retry_requests.run_once, RETRY_REQUESTS_POLL_S),
            repeat(self.sweeper.run_once, release.SWEEP_EVERY_S),
            repeat(self.watch_progress, STALL_POLL_S),
            repeat(self.lock.check, lock.RENEW_S),
            self.engine_check.run(),
            self.replica_watch.run(),
            self.weight_updates.run(),
            self.load.run(),
            repeat(self.reporter.report, reporter.EVERY_S),
            repeat(self.metrics.write, metrics.WRITE_S),
            repeat(self.lags.poll, metrics.LAG_POLL_S),
            self.lag.run(),
        ]

    async def drive_and_shut_down(self) -> None:
        await self.drive()
        if self.phase.done:
            if why := self.phase.out_of_data:
                logger.warning("action=out_of_data %s", why)
            self.evaluations.cancel(self.evaluations.open, "the run has ended")
            await self.shutdown.finish()
            await self.trainer.read()
            await self.releaser.run_once()
            await self.sweeper.run_once()
        else:
            await self.shutdown.drain()

    def awaited_at_end(self) -> bool:
        return self.evaluations.awaited_at_end() or self.trainer.last_broadcast_awaited()

    async def drive(self) -> None:
        self.pipeline.survey.begin()
        while self.phase.running and (not self.phase.done or self.awaited_at_end()):
            more_to_plan = self.evaluations.plan(ending=self.phase.done)
            more_to_plan |= self.planner.plan()
            crash_points.passed("planned")
            await self.composer.drop_stale()
            if self.composer.compose():
                self.metrics.composed()
                await self.ledger.committed()
                crash_points.passed("composed")
            # Nothing to take unless the estimator has a batch phase.
            await self.pipeline.batch_phase.take_result(self.replies.job_failed)
            await self.submitter.submit_waiting()
            encoded = self.composer.encoded(visible=self.sealer.visible)
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
        try:
            if not await self.sealer.seal(batch, ranks, start_version=self.ledger.state.start_version):
                return False
        except OtherPlan as error:
            self.composer.form_again(batch, f"{error}")
            return False
        crash_points.passed("sealed")
        await self.deliver(batch)
        await self.ledger.committed()
        crash_points.passed("delivered")
        logger.info("action=delivered step=%d rollouts=%d", batch.step, self.ledger.untrained.get(batch.step, 0))
        return True

    async def deliver_sealed_steps(self) -> None:
        """Deliver open steps that have a manifest: a crash may have come before the ledger recorded the delivery."""
        for batch in list(self.ledger.batches.values()):
            if manifest := await in_io_thread(read_manifest, self.sealer.store, batch.step):
                await in_io_thread(self.sealer.publish, manifest)
                await self.deliver(batch)

    async def deliver(self, batch: BatchRecord) -> None:
        """What takes long is computed in a thread before; the step and its metrics are one transaction."""
        of_rollouts = await self.metrics.of_rollouts(batch)
        ranks = [result.rank for result in self.pipeline.encode.results(batch) if result.rank]
        self.metrics.measure(batch, ranks, of_rollouts)
        self.pipeline.release_inputs(batch)
        self.ledger.deliver(batch)

    async def read_replies(self) -> None:
        sent_before = await self.stream.newest()
        while True:
            # Deaths that were replied before this start do not count: their cause may be repaired.
            self.pipeline.causes.catch_up(self.stream.behind(sent_before))
            entries = await self.stream.read()
            if not entries:
                continue
            crash_points.passed("replies_read")
            async for some in in_slices(entries):
                for reply in filter(None, map(self.stream.accept, some)):
                    self.replies.apply(reply)
            self.changed.set()
            await self.ledger.committed()
            crash_points.passed("replies_committed")
            await self.stream.trim()
            if len(entries) < AT_ONCE:
                await asyncio.sleep(GATHER_S)

    async def reconcile(self) -> None:
        while True:
            await asyncio.sleep(self.reconciler.poll_s)
            for node in await self.attendance.exchange():
                self.gates.worker_excluded(node)
            snapshot = await self.reconciler.poll()
            if not await self.caught_up_with(await self.stream.newest()):
                continue
            expired = await self.reconciler.judge(snapshot)
            self.changed.set()
            await self.ledger.committed()
            await remove_leases(self.broker, expired)
            if unneeded := self.pipeline.play.take_unneeded():
                await self.shutdown.revoke(unneeded)

    async def caught_up_with(self, reply_id: str) -> bool:
        try:
            async with asyncio.timeout(CATCH_UP_S):
                while self.stream.behind(reply_id):
                    await asyncio.sleep(0.01)
        except TimeoutError:
            return False
        return True

    async def follow_trainer(self) -> None:
        before = self.trainer.state
        await self.trainer.read()
        await self.ledger.committed()
        await self.releaser.run_once()
        await self.trainer.write_status("; ".join(self.troubles.texts()) or "rollouts are being generated")
        if self.trainer.state != before:
            self.changed.set()

    async def watch_progress(self) -> None:
        """Not while the run stops: `recovery.drain_s` bounds that."""
        if self.phase.running:
            self.stall.look()

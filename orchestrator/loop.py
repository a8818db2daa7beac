"""The orchestrator: duties on one event loop that share the ledger. In the order of a rollout through the run:

    drive           plan groups, compose steps, submit waiting jobs, seal encoded steps
    read_replies    apply the workers' replies to their groups, commit, trim the stream
    reconcile       find lost jobs and have them submitted again
    follow_trainer  read acknowledgements and policy versions, release blobs
    sweep           delete files that the ledger does not name
    engine, weights ask the replicas which weights they have; load others
    engine_check    examine an engine that was away at the start, before the first rollout is submitted

and in addition: renew the run's lock (`lock.keep`), report (`reporter`, `metrics`), measure event loop lag (`lag`, and
`lags` of other processes). `drive` sleeps until a reply, a loss, the trainer or half a second wakes it. A duty that
raises ends them all. The Orchestrator wires the components; they do not import it.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from headpond.batches import EncodedRank, read_manifest
from headpond.config import RunConfig
from headpond.errors import OtherPlan
from headpond.event_loop.loop_lag import LoopLag
from headpond.event_loop.offload import in_io_thread
from headpond.orchestrator import release
from headpond.orchestrator.duties import crash_points
from headpond.orchestrator.duties.slices import in_slices
from headpond.orchestrator.examples.evaluation import Evaluations
from headpond.orchestrator.examples.retry_requests import RetryRequests
from headpond.orchestrator.exchange.gates import Gates
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.orchestrator.exchange.reply_stream import AT_ONCE, ReplyStream
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import BatchRecord
from headpond.orchestrator.lock import RunLock
from headpond.orchestrator.pipeline import Pipeline
from headpond.orchestrator.planning.composer import Composer, Sealer
from headpond.orchestrator.planning.planner import Planner
from headpond.orchestrator.reconciler import Reconciler
from headpond.orchestrator.release import Releaser, Sweeper
from headpond.orchestrator.replies import Replies
from headpond.orchestrator.reporting.endpoint import Endpoint
from headpond.orchestrator.reporting.metrics import LagPoller, Metrics
from headpond.orchestrator.reporting.next_step import NextStep
from headpond.orchestrator.reporting.prometheus import RunCollector
from headpond.orchestrator.reporting.reporter import Reporter, Sources, StatusCallback
from headpond.orchestrator.reporting.stall import StallWatch
from headpond.orchestrator.serving.concurrency import LoadWatch
from headpond.orchestrator.serving.engine_check import EngineCheck
from headpond.orchestrator.serving.replica_watch import ReplicaWatch
from headpond.orchestrator.serving.weight_updates import WeightUpdates
from headpond.orchestrator.shutdown import Phase, Shutdown, StopRequests
from headpond.orchestrator.submission import Submitter
from headpond.orchestrator.trainer import Trainer
from headpond.orchestrator.workforce.attendance import Attendance
from headpond.orchestrator.workforce.leases import remove_leases
from headpond.sinks.sending import Sinks
from headpond.store import open_store

logger = logging.getLogger("headpond.orchestrator")

WAKE_S = 0.5
GATHER_S = 0.01  # gathers replies for one commit: handling six at a time as they arrive costs a third more CPU
TRAINER_POLL_S = 0.25
STALL_POLL_S = 1.0
RETRY_REQUESTS_POLL_S = 2.0
CATCH_UP_S = 5.0  # when applying the replies takes longer than this, losses are judged in the next round
PROCESS = "orchestrator"  # its name among the processes that publish their lag


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
        stop: StopRequests,
        on_status: StatusCallback,
        http_url: str | None = None,
        batch_phase: bool = False,
        engine_check: Sequence[str] | None = None,
    ) -> None:
        """`batch_phase`: whether the estimator has one. `engine_check`: the command that examines the engine, if that
        is still to be done."""
        self.config = config
        self.run_id = run
        self.ledger = ledger
        self.broker = broker
        self.lock = lock
        self.lag = lag
        self.stop = stop
        self.store = open_store(config.store_url)
        self.changed = asyncio.Event()

        self.trainer = Trainer(config, ledger)
        self.gates = Gates()
        self.attendance = Attendance(config, broker, first_sequence=ledger.state.sequence)
        self._watch_engine(engine_check)
        self.pipeline = Pipeline(
            config, run, ledger, self.gates, self.evaluations, batch_phase=batch_phase,
            least_version=lambda: self.engine.least_version,
            abandoned_versions=lambda: self.engine.abandoned.versions,
        )  # fmt: skip
        self.replies = Replies(config, ledger, self.pipeline, self.attendance)
        self.planner = Planner(
            config, ledger, self.trainer, self.pipeline, may_begin=self.engine.may_begin,
            most_in_flight=lambda: self.load.limit.value,
        )  # fmt: skip
        self.submitter = Submitter(
            config, run, ledger, broker, self.pipeline, self.attendance, may_play=lambda: not self.engine_check.pending,
        )  # fmt: skip
        self.stream = ReplyStream(run, broker, ledger)
        self.composer = Composer(config, ledger, self.trainer, self.pipeline)
        self.sealer = Sealer(config)
        self.reconciler = Reconciler(config, run, ledger, broker, self.pipeline, self.replies, self.gates)
        self.releaser = Releaser(config, ledger, self.trainer)
        self.sweeper = Sweeper(config, run, ledger)
        self.shutdown = Shutdown(config, run, ledger, broker, self.stream)
        self.lags = LagPoller(broker, own=PROCESS)
        self.metrics = Metrics(config, ledger, lag, self.lags)
        self.sinks = Sinks(config, run)
        self.next_step = NextStep(config, ledger, self.trainer, self.pipeline, self.reconciler)
        self.reporter = Reporter(self._sources(http_url), on_status)
        self.retry_requests = RetryRequests(config, ledger)
        self.stall = StallWatch(config, ledger, self.trainer, self.reporter.waiting_for)

    def _watch_engine(self, engine_check: Sequence[str] | None) -> None:
        self.engine = ReplicaWatch(self.config, self.run_id, self.ledger, self.trainer)
        self.evaluations = Evaluations(self.config, self.ledger, served_version=lambda: self.engine.served_version)
        if self.config.engine.weight_update == "headpond":
            self.trainer.holds_update = self.evaluations.holds_update
        self.weights = WeightUpdates(self.config, self.run_id, self.trainer, self.engine)
        self.load = LoadWatch(self.config, self.ledger, self.engine.all)
        self.engine_check = EngineCheck(self.config, engine_check)

    def _sources(self, http_url: str | None) -> Sources:
        return Sources(
            config=self.config, run=self.run_id, http_url=http_url, ledger=self.ledger, broker=self.broker,
            lag=self.lag, lags=self.lags,
            phase=lambda: "done" if self.done else self.stop.phase,
            snapshot=lambda: self.reconciler.latest,
            running=lambda: self.reconciler.running,
            notes=self._notes,
            excluded=lambda: self.attendance.excluded,
            silent=lambda: self.attendance.silent,
            replicas=self._replicas,
            evaluations=self.evaluations.status,
            losses=self.pipeline.causes.recent,
            next_step=self.next_step.status,
            troubles=lambda: [
                self.broker.trouble, self.ledger.trouble, *self.gates.troubles, self.pipeline.causes.trouble,
                self.submitter.inputs.writing.trouble, self.sealer.sealing.trouble, self.planner.trouble,
                *self.trainer.troubles, self.metrics.writing.trouble,
                self.releaser.releasing.trouble, self.sweeper.sweeping.trouble, *self.engine.troubles,
                *self.weights.troubles, self.engine_check.trouble, self.trainer.last_broadcast if self.done else None,
            ],
        )  # fmt: skip

    def _notes(self) -> list[str]:
        ends = self.done or self.stop.phase != "running"  # until then, the run waits for it
        untrained = [*filter(None, [self.pipeline.causes.untrained])] if ends else []
        untrained += self.pipeline.causes.notes
        load = [] if ends else self.load.notes  # nothing is submitted any more that it could hold back
        return [
            *untrained,
            *self.planner.notes,
            *self.metrics.notes,
            *self.engine.notes,
            *load,
            *self.releaser.notes,
            *self.sinks.notes,
        ]

    def _replicas(self) -> dict[str, Any]:
        weights, loads, costs = self.engine.status(), self.load.status(), self.replies.replica_costs.status()
        return {url: {**weights[url], **loads.get(url, {}), **costs[url]} for url in weights}

    def endpoint(self) -> Endpoint:
        """The HTTP endpoint, for `endpoint.serving`."""
        status = self.reporter.latest_status
        collector = RunCollector(
            steps=self.config.steps, status=status, ledger=self.ledger, metrics=self.metrics, lag=self.lag,
            lags=self.lags,
        )  # fmt: skip
        return Endpoint(status, collector)

    async def run(self) -> None:
        """Drive the run until the last step is delivered or a stop is requested; open work then waits in the ledger."""
        if not self.done:  # else the trainer of a finished run, whose `steps` were raised, sees its end
            await self.trainer.write_status("the run is starting")
        await self.deliver_sealed_steps()
        self.composer.resume()
        self.planner.resume()
        self.evaluations.resume()
        await self.submitter.remove_leftovers()
        await self.shutdown.resume()
        await self.attendance.exchange()
        duties = [self.read_replies, self.reconcile, self.follow_trainer, self.sweep, self.lock.keep, self.engine.run,
                  self.engine_check.run, self.load.run, self.weights.run, self.reporter.run, self.metrics.run,
                  self.lag.run, self.lags.run, self.watch_progress,
                  self.follow_retry_requests]  # fmt: skip
        async with self.sinks.sending():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(duty()) for duty in duties]
                await self.stop.run_unless_stopped(self.drive_and_shut_down())
                for task in tasks:
                    task.cancel()
            await self.metrics.write()
        await self.reporter.write()
        why = (self.planner.out_of_data or "the run is complete") if self.done else "the orchestrator was stopped"
        await self.trainer.write_status(why, ended=self.done)

    async def drive_and_shut_down(self) -> None:
        await self.drive()
        if self.done:
            if why := self.planner.out_of_data:
                logger.warning("action=out_of_data %s", why)
            self.evaluations.cancel(self.evaluations.open, "the run has ended")
            await self.shutdown.finish()
            await self.trainer.read()
            await self.releaser.run_once()
            await self.sweeper.run_once()
        else:
            await self.shutdown.drain()

    @property
    def done(self) -> bool:
        return self.ledger.state.steps_delivered >= self.config.steps or self.planner.out_of_data is not None

    def awaited_at_end(self) -> bool:
        return self.evaluations.awaited_at_end() or self.trainer.last_broadcast_awaited

    async def drive(self) -> None:
        self.pipeline.survey.begin()
        while self.stop.phase is Phase.RUNNING and (not self.done or self.awaited_at_end()):
            more_to_plan = self.evaluations.plan(ending=self.done)
            more_to_plan |= self.planner.plan()
            crash_points.passed("planned")
            await self.composer.drop_stale()
            if self.composer.compose():
                self.metrics.composed()
                await self.ledger.committed()
                crash_points.passed("composed")
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
            if manifest := await in_io_thread(read_manifest, self.store, batch.step):
                await in_io_thread(self.sealer.publish, manifest)
                await self.deliver(batch)

    async def deliver(self, batch: BatchRecord) -> None:
        """What takes long is computed in a thread before; the step and its metrics are one transaction."""
        await self.metrics.prepare(batch)
        ranks = [result.rank for result in self.pipeline.encode.results(batch) if result.rank]
        self.metrics.measure(batch, ranks)
        self.pipeline.release_inputs(batch)
        self.ledger.deliver(batch)

    async def read_replies(self) -> None:
        sent_before = await self.stream.newest()
        while True:
            self.pipeline.causes.catching_up = self.stream.behind(sent_before)
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
            play = self.pipeline.play
            if play.unneeded:
                unneeded, play.unneeded = play.unneeded, []
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
        while True:
            before = self.trainer.state
            await self.trainer.read()
            await self.ledger.committed()
            await self.releaser.run_once()
            await self.trainer.write_status("; ".join(self.reporter.waiting_for()) or "rollouts are being generated")
            if self.trainer.state != before:
                self.changed.set()
            await asyncio.sleep(TRAINER_POLL_S)

    async def follow_retry_requests(self) -> None:
        while True:
            await self.retry_requests.run_once()
            await asyncio.sleep(RETRY_REQUESTS_POLL_S)

    async def watch_progress(self) -> None:
        """Not while the run stops: `recovery.drain_s` bounds that."""
        while self.stop.phase is Phase.RUNNING:
            self.stall.look()
            await asyncio.sleep(STALL_POLL_S)

    async def sweep(self) -> None:
        while True:
            await self.sweeper.run_once()
            await asyncio.sleep(release.SWEEP_EVERY_S)

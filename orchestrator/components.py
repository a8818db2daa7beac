"""The components of a run, in the order in which they need one another. No component imports `loop.py`; the
reporter reads them all."""

import asyncio
from collections.abc import Sequence

from headpond.config import RunConfig
from headpond.engines.replicas.control import Replica
from headpond.event_loop.loop_lag import LoopLag
from headpond.orchestrator.duties.housekeeping import Troubles
from headpond.orchestrator.examples.evaluation import Evaluations
from headpond.orchestrator.examples.retry_requests import RetryRequests
from headpond.orchestrator.exchange.gates import Gates
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.orchestrator.exchange.reply_stream import ReplyStream
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.lock import RunLock
from headpond.orchestrator.pipeline import Pipeline
from headpond.orchestrator.planning.composer import Composer, Sealer
from headpond.orchestrator.planning.phase import RunPhase
from headpond.orchestrator.planning.planner import Planner
from headpond.orchestrator.reconciler import Reconciler
from headpond.orchestrator.release import Releaser, Sweeper
from headpond.orchestrator.replies import Replies
from headpond.orchestrator.reporting.metrics import LagPoller, Metrics
from headpond.orchestrator.reporting.reporter import Reporter, StatusCallback
from headpond.orchestrator.reporting.stall import StallWatch
from headpond.orchestrator.serving.concurrency import LoadWatch
from headpond.orchestrator.serving.engine_check import EngineCheck
from headpond.orchestrator.serving.replica_watch import ReplicaWatch
from headpond.orchestrator.serving.serving_weights import ServingWeights
from headpond.orchestrator.serving.weight_updates import WeightUpdates
from headpond.orchestrator.shutdown import Shutdown, StopRequests
from headpond.orchestrator.submission import Submitter
from headpond.orchestrator.trainer import Trainer
from headpond.orchestrator.workforce.attendance import Attendance
from headpond.sinks.sending import Sinks

PROCESS = "orchestrator"  # its name among the processes that publish their lag


class Components:
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
        troubles: Troubles,
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
        self.troubles = troubles
        self.changed = asyncio.Event()  # what `drive` waits for
        self.phase = RunPhase(config, ledger, stop, troubles)

        self._watch_engine(troubles, engine_check)
        self._play_groups(troubles, batch_phase=batch_phase)
        self._form_steps(troubles)
        self._report(troubles, http_url, on_status)

    def _watch_engine(self, troubles: Troubles, engine_check: Sequence[str] | None) -> None:
        """Which weights the engine has, and what it can serve."""
        config, run, ledger = self.config, self.run_id, self.ledger
        replicas = [Replica(url=url) for url in config.engine.urls]
        self.serving = ServingWeights(config, ledger, replicas)
        self.evaluations = Evaluations(config, ledger, served_version=self.serving.served_version)
        self.gates = Gates(troubles)
        self.trainer = Trainer(config, ledger, holds_update=self.evaluations.holds_update, troubles=troubles)
        self.replica_watch = ReplicaWatch(config, run, ledger, self.trainer, self.serving, troubles)
        self.weight_updates = WeightUpdates(config, run, self.trainer, self.serving, troubles)
        self.load = LoadWatch(config, ledger, replicas)
        self.engine_check = EngineCheck(config, engine_check, troubles)

    def _play_groups(self, troubles: Troubles, *, batch_phase: bool) -> None:
        """Groups and their jobs."""
        config, run, ledger, broker = self.config, self.run_id, self.ledger, self.broker
        self.pipeline = Pipeline(
            config, run, ledger, self.gates, self.evaluations, self.serving, batch_phase=batch_phase, troubles=troubles
        )
        self.planner = Planner(config, ledger, self.trainer, self.pipeline, self.load.limit, self.phase, troubles)
        self.attendance = Attendance(config, broker, first_sequence=ledger.state.sequence, troubles=troubles)
        self.submitter = Submitter(
            config, run, ledger, broker, self.pipeline, self.attendance, self.engine_check, troubles
        )
        self.stream = ReplyStream(run, broker, ledger)
        self.replies = Replies(config, ledger, self.pipeline, self.attendance)
        self.reconciler = Reconciler(config, run, ledger, broker, self.pipeline, self.replies, self.gates)
        self.retry_requests = RetryRequests(config, ledger)

    def _form_steps(self, troubles: Troubles) -> None:
        """Steps and their files."""
        config, run, ledger = self.config, self.run_id, self.ledger
        self.composer = Composer(config, ledger, self.trainer, self.pipeline)
        self.sealer = Sealer(config, troubles)
        self.releaser = Releaser(config, ledger, self.trainer, troubles)
        self.sweeper = Sweeper(config, run, ledger, troubles)
        self.shutdown = Shutdown(config, run, ledger, self.broker, self.stream)

    def _report(self, troubles: Troubles, http_url: str | None, on_status: StatusCallback) -> None:
        config, run, ledger = self.config, self.run_id, self.ledger
        self.lags = LagPoller(self.broker, own=PROCESS)
        self.metrics = Metrics(config, ledger, self.lag, self.lags, troubles)
        self.sinks = Sinks(config, run)
        troubles.notes.add(lambda: self.sinks.notes)
        self.reporter = Reporter(self, troubles, http_url, on_status)
        self.stall = StallWatch(config, ledger, self.trainer, troubles)

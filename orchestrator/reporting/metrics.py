"""What every step was like: measured as it is delivered, kept in the ledger with it, written to metrics.jsonl.

A step and its line are one transaction, so a line is never lost and never counted twice; the file follows as soon as
its disk takes it, from a thread, and holds up nothing.
"""

import asyncio
import logging
import time
from collections.abc import Mapping

import orjson

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.records import BatchRecord
from orchestrator.reporting import step_metrics
from orchestrator.reporting.lags import Lags
from orchestrator.reporting.metrics_file import NAME, MetricsFile, dumps
from penstock.config import RunConfig
from penstock.ledger.states import JobKind, RolloutState
from penstock.runtime.loop_lag import LoopLag
from penstock.runtime.offload import in_io_thread
from penstock.store import Store

logger = logging.getLogger("penstock.metrics")

RETRY_S = 1.0
UNWRITTEN, COUNTED = "metrics_unwritten", "metrics_counted"
"""in the ledger: lines that the file may not have yet, and what had been counted up to the last step"""
COUNTERS = ("solved_", "matched:", "settled:", "seconds:")


class Metrics:
    def __init__(self, config: RunConfig, ledger: Ledger, lag: LoopLag, lags: Lags) -> None:
        self._ledger = ledger
        self._data_ranks = config.batch.data_ranks
        self._lag = lag
        self._lags = lags
        self._file = MetricsFile(config.run_dir / NAME, Store(config.store_dir))
        self._unwritten: dict[int, str] = {}
        self.last: Mapping[str, float] = {}
        """of the last step"""
        for line in str(ledger.meta.get(UNWRITTEN) or "").splitlines():
            self.last = orjson.loads(line)
            self._unwritten[int(self.last["step"])] = line
        self._delivered_at = self._composed_at = time.monotonic()
        self._changed = asyncio.Event()
        self._changed.set()
        self.trouble: str | None = None
        """why metrics.jsonl falls behind"""

    def composed(self) -> None:
        self._composed_at = time.monotonic()

    def measure(self, batch: BatchRecord) -> None:
        """To be called in the transaction that delivers `batch`, before it is delivered."""
        counted = orjson.loads(str(self._ledger.meta.get(COUNTED) or "{}"))
        totals = counters(self._ledger) | {"delivered": _delivered(self._ledger) + sum(1 for _ in batch.rollouts())}
        since = {key: value - counted.get(key, 0) for key, value in totals.items()}
        self.last = {
            "step": batch.step,
            "time": int(time.time()),
            **self._of(batch, since),
            **step_metrics.of_totals(totals),
            **step_metrics.of_lag(self._lag.drain(), self._lags.others),
        }
        self._unwritten[batch.step] = dumps(self.last)
        self._ledger.set(UNWRITTEN, "\n".join(self._unwritten.values()))
        self._ledger.set(COUNTED, orjson.dumps(totals).decode())
        self._changed.set()

    def _of(self, batch: BatchRecord, since: Mapping[str, float]) -> step_metrics.Values:
        ledger, now = self._ledger, time.monotonic()
        version = ledger.number("policy_version")
        jobs = map(ledger.jobs.get, map(batch.job_id, range(self._data_ranks)))
        longest_s = {kind: ledger.seconds(f"longest:{kind}") for kind in JobKind}
        step_s, self._delivered_at = now - self._delivered_at, now
        return {
            "policy_version": version,
            **step_metrics.of_rollouts(batch.groups, policy_version=version),
            **step_metrics.of_ranks(job.result.rank for job in jobs if job and job.result and job.result.rank),
            **step_metrics.of_window(since, groups=len(batch.groups), longest_s=longest_s, step_s=step_s),
            "time/composed_to_sealed_s": now - self._composed_at,
        }

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if not await self.write():
                await asyncio.sleep(RETRY_S)
                self._changed.set()

    async def write(self) -> bool:
        """False when the disk does not take it: the lines wait, the run goes on."""
        lines, delivered = dict(self._unwritten), self._ledger.number("steps_delivered")
        try:
            await in_io_thread(self._file.complete, lines, delivered=delivered)
        except OSError as error:
            if self.trouble is None:
                logger.error("action=metrics_wait path=%s error=%s", self._file.path, error.strerror)
            self.trouble = f"{self._file.path} cannot be written ({error.strerror}): make room or mend its disk"
            return False
        self._unwritten = {step: line for step, line in self._unwritten.items() if step >= delivered}
        self.trouble = None
        return True


def counters(ledger: Ledger) -> dict[str, float]:
    """What the run has counted since it began."""
    counts = {
        "planned": ledger.number("rollouts_planned"),
        "generated": ledger.number("rollouts_generated"),
        "delivered": _delivered(ledger),
        "dead": ledger.states[RolloutState.DEAD],
        "fenced": ledger.number("fenced"),
        "groups_dropped": ledger.number("groups_dropped"),
        "tokens_generated": ledger.number("tokens_generated"),
        **{f"filtered:{reason}": number for reason, number in ledger.reasons.items()},
    }
    return counts | {key: ledger.seconds(key) for key in ledger.meta if key.startswith(COUNTERS)}


def _delivered(ledger: Ledger) -> int:
    return ledger.states[RolloutState.DELIVERED] + ledger.states[RolloutState.TRAINED]

"""Metrics of every delivered step: measured as it is delivered, kept in the ledger with it, written to metrics.jsonl.

A step and its line are one transaction, so a line is neither lost nor counted twice. The file is written from a thread
and delays nothing; while its disk is full, the lines wait in the ledger.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import orjson

from headpond.batches import EncodedRank, read_manifest
from headpond.config import RunConfig
from headpond.errors import BlobError
from headpond.event_loop.lag_summaries import LagSummary, read_summaries_async
from headpond.event_loop.loop_lag import LoopLag
from headpond.event_loop.offload import in_io_thread
from headpond.ledger.state_rows import RunState
from headpond.orchestrator.duties.housekeeping import Reported, Troubles
from headpond.orchestrator.examples import evaluation
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import BatchRecord
from headpond.orchestrator.reporting import step_metrics
from headpond.orchestrator.run_dir import EVALUATIONS
from headpond.store import Store, open_store

FILE_NAME = "metrics.jsonl"
TAIL_BYTES = 1 << 20  # holds hundreds of lines; one of a hundred environments takes 50 kB
FULL_BYTES = 64 << 20  # then a new file begins: 20,000 steps of one environment
OLDER_FILES = 3  # that are kept
UNWRITTEN_MOST = (
    256  # lines in the ledger, which is rewritten with each step; of older ones, the manifest's part remains
)
POLICY_FAILED_MOST = 0.5  # of a step's rollouts: from there on it is noted
WRITE_S = 1.0
LAG_POLL_S = 2.0


class LagPoller:
    """The event loop lag of the run's other processes, which they publish in Redis."""

    def __init__(self, broker: Broker, own: str) -> None:
        self._broker = broker
        self._own = own
        self.others: list[LagSummary] = []  # the last window of every process but this one

    async def poll(self) -> None:
        summaries = await self._broker.call(read_summaries_async)
        self.others = [lag for lag in summaries if lag.process != self._own]


class Metrics:
    def __init__(
        self, config: RunConfig, ledger: Ledger, lag: LoopLag, lags: LagPoller, troubles: Troubles | None = None
    ) -> None:
        self._ledger = ledger
        self._run_dir = config.run_dir
        self._lag = lag
        self._lags = lags
        store = open_store(config.store_url)
        self._file = LinesFile(config.run_dir / FILE_NAME, "step", lambda step: _from_manifest(store, step))
        self._evaluations = LinesFile(config.run_dir / EVALUATIONS, "evaluation", lambda _: None)
        self._unwritten: dict[int, str] = {}
        self.last: Mapping[str, float] = {}  # of the last delivered step
        # a rollout of that step, if it is noted and was delivered by this process
        self._policy_failed: str | None = None
        for step, row in ledger.state.metrics_lines.items():
            self.last = orjson.loads(row.line)
            self._unwritten[int(step)] = row.line
        self._delivered_at = self._composed_at = time.monotonic()
        self._written = -1  # delivered steps whose lines are in the file
        self.writing = Reported(f"write {self._file.path}", "free space or repair the disk", troubles=troubles)
        (troubles or Troubles()).notes.add(self.notes)

    def notes(self) -> list[str]:
        """Without the failures' texts, which may quote the policy."""
        rate, rollouts = self.last.get("policy_error_rate", 0.0), self.last.get("rollouts", 0)
        if rate < POLICY_FAILED_MOST:
            return []
        failed = f"{rate * rollouts:.0f} of {rollouts} rollouts of step {self.last['step']}"
        command = f"`headpond why {self._run_dir} {self._policy_failed or 'ROLLOUT'}`"
        return [f"{failed} ended with a failure of the policy, such as a time-out: {command} says which"]

    def composed(self) -> None:
        """Call when a step has been composed."""
        self._composed_at = time.monotonic()

    async def of_rollouts(self, batch: BatchRecord) -> step_metrics.Values:
        """Compute in a thread what depends on the rollouts of `batch`: 8 ms for 2,048 of them."""
        return await in_io_thread(_of_rollouts, batch, self._ledger.state.policy_version)

    def measure(self, batch: BatchRecord, ranks: Sequence[EncodedRank], of_rollouts: step_metrics.Values) -> None:
        """Call in the transaction that delivers `batch`, before it is delivered."""
        last_step, lines = self._ledger.state.last_step, self._ledger.state.metrics_lines
        totals = self._ledger.state.totals()
        states = Counter(totals["rollout_counts"]["states"]["by_name"])
        totals["rollout_counts"]["states"]["by_name"] = states + Counter(delivered=int(of_rollouts["rollouts"]))
        since = RunState.increase(totals, last_step.totals)
        self.last = {
            "step": batch.step,
            "time": int(time.time()),
            **of_rollouts,
            **self._of(batch, ranks, since),
            **step_metrics.of_totals(RunState.increase(totals, {})),
            **evaluation.unreported(self._ledger),
            **step_metrics.of_lag(self._lag.drain(), self._lags.others),
        }
        self._policy_failed = step_metrics.policy_failed(batch.groups) if self.notes() else None
        self._unwritten[batch.step] = dumps(self.last)
        if len(self._unwritten) > UNWRITTEN_MOST:
            self._unwritten.pop(min(self._unwritten))
        lines[str(batch.step)].line = self._unwritten[batch.step]
        for step in [step for step in lines if int(step) not in self._unwritten]:
            lines.forget(step)
        last_step.totals = totals

    def _of(self, batch: BatchRecord, ranks: Sequence[EncodedRank], since: RunState) -> step_metrics.Values:
        longest_s = {name: stage.longest_s for name, stage in self._ledger.state.stages.items()}
        now = time.monotonic()
        step_s, self._delivered_at = now - self._delivered_at, now
        return {
            **step_metrics.of_ranks(ranks),
            **step_metrics.of_window(since, groups=len(batch.groups), longest_s=longest_s, step_s=step_s),
            "time/composed_to_sealed_s": now - self._composed_at,
        }

    async def write(self) -> None:
        """Append the missing lines. They wait in the ledger while a file cannot be written; the run continues."""
        lines, delivered = dict(self._unwritten), self._ledger.state.steps_delivered
        evaluated = {int(number): row.line for number, row in self._ledger.state.evaluation_lines.items()}
        if delivered == self._written and not evaluated:
            return
        await self._ledger.committed()
        with self.writing:
            await in_io_thread(self._file.complete, lines, until=delivered)
            self._unwritten = {step: line for step, line in self._unwritten.items() if step >= delivered}
            self._written = delivered
            if evaluated:
                await in_io_thread(self._evaluations.complete, evaluated, until=max(evaluated) + 1)
            for number in evaluated:
                self._ledger.state.evaluation_lines.forget(str(number))


class LinesFile:
    """metrics.jsonl and evaluations.jsonl: numbered lines in order, appended to and never rewritten.

    Which lines are missing is read from the file itself, so writing is idempotent: after a kill, or while an earlier
    attempt still runs in its thread. A full file is renamed to metrics.1.jsonl, that to metrics.2.jsonl, and so on.
    """

    def __init__(self, path: Path, key: str, lost: Callable[[int], str | None]) -> None:
        """`key` holds the number of a line. `lost` makes the line of a number that the ledger does not have."""
        self.path = path
        self._key = key
        self._lost = lost
        self._writing = threading.Lock()

    def complete(self, lines: Mapping[int, str], *, until: int) -> None:
        """Cut off a partial last line and append the missing lines of all numbers before `until`. Blocks."""
        with self._writing:
            with self._opened() as file:
                last, end = last_line(file, self._key)
                file.truncate(end)
            if last < 0:
                last = self._last_of_older()
            numbers = range(last + 1, until)
            missing = [line for number in numbers if (line := lines.get(number) or self._lost(number))]
            if missing and end >= FULL_BYTES:
                self._begin_another()
            if missing:
                self._append(missing)

    def _opened(self) -> IO[bytes]:
        return os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")

    def _append(self, lines: list[str]) -> None:
        with self._opened() as file:
            file.seek(0, os.SEEK_END)
            file.write("".join(f"{line}\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())  # the ledger drops these lines with the next step

    def _older(self, number: int) -> Path:
        return self.path.with_suffix(f".{number}{self.path.suffix}")

    def _begin_another(self) -> None:
        """A process that is killed between two renames leaves a free number, from which the next one goes on."""
        numbers = range(1, OLDER_FILES + 1)
        free = next((number for number in numbers if not self._older(number).exists()), OLDER_FILES)
        for number in range(free - 1, 0, -1):
            self._older(number).replace(self._older(number + 1))
        self.path.replace(self._older(1))

    def _last_of_older(self) -> int:
        try:
            with self._older(1).open("rb") as file:
                return last_line(file, self._key)[0]
        except FileNotFoundError:
            return -1


def _from_manifest(store: Store, step: int) -> str:
    """The line of a step whose ledger was lost: the manifest still has rewards and sizes."""
    try:
        manifest = read_manifest(store, step)
    except (BlobError, OSError):
        manifest = None
    return dumps(step_metrics.of_manifest(manifest) if manifest else {"step": step})


def _of_rollouts(batch: BatchRecord, version: int) -> step_metrics.Values:
    """In a thread, with what `Ledger.deliver` reads of the rollouts."""
    _ = batch.stored_bytes
    return {"policy_version": version, **step_metrics.of_rollouts(batch.groups, policy_version=version)}


def dumps(values: Mapping[str, float]) -> str:
    """Six significant digits; integers stay integers."""
    rounded = {key: float(f"{value:.6g}") if type(value) is float else value for key, value in values.items()}
    return orjson.dumps(rounded).decode()


def last_line(file: IO[bytes], key: str) -> tuple[int, int]:
    """`key`, a number, of the last complete line (-1 without one), and the offset of its end."""
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - TAIL_BYTES)
    file.seek(start)
    tail = file.read()
    end = tail.rfind(b"\n") + 1
    while end > 0:
        begin = tail.rfind(b"\n", 0, end - 1) + 1
        if (number := _number(tail[begin : end - 1], key)) is not None:
            return number, start + end
        end = begin
    return -1, start


def _number(line: bytes, key: str) -> int | None:
    try:
        values: Any = orjson.loads(line)
        return int(values[key])
    except (ValueError, TypeError, KeyError):
        return None

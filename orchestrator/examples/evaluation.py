"""Evaluations: examples that are played every few policy versions and never trained on.

Their rollouts are jobs on the queue `rollouts`, with records and counts of their own: no step has one. Files are
deleted as soon as a rollout's score is in. One evaluation of each name is open at a time.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from headpond import ids
from headpond.config import RunConfig
from headpond.config.engine import EvaluationSettings
from headpond.errors import shortened
from headpond.ledger.evaluations import EvaluationState, PlayState
from headpond.ledger.states import JobState
from headpond.orchestrator.examples.evaluation_values import kept, values
from headpond.orchestrator.ledger.evaluations import ClosedEvaluation, EvaluationRecord, EvaluationRollout
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import EVALUATION_STAGES, JobRecord
from headpond.records.inputs import GroupInputs
from headpond.records.rollout import RolloutResult

logger = logging.getLogger("headpond.evaluation")

EVALUATION, EVALUATION_SCORE = EVALUATION_STAGES
AT_ONCE = 32  # rollouts that begin between two waits of the loop
COUNTED = (PlayState.EVALUATED, PlayState.DEAD, PlayState.CANCELLED)
PLANNED = "planned"
"""beside COUNTED, in `RunState.evaluation_rollouts`"""


class Evaluations:
    def __init__(self, config: RunConfig, ledger: Ledger, *, served_version: Callable[[], int] | None = None) -> None:
        """`served_version`: of the engine's weights, which may be older than the published ones."""
        self._settings = config.evaluation
        self._max_in_flight = config.rollouts.max_in_flight
        self._ledger = ledger
        self._ending_since: float | None = None
        self._update_since: float | None = None
        self._served_version = served_version or (lambda: ledger.state.policy_version)

    def resume(self) -> None:
        """Cancel the open ones that are no longer configured."""
        for record in [each for each in self._ledger.evaluations.values() if each.name not in self._settings]:
            self._cancel(record, "not configured any more")

    def plan(self, *, ending: bool = False) -> bool:
        """Begin the evaluations that are due, unless the run is `ending`, and rollouts of the open ones. True when
        more could begin at once."""
        more = False
        for name, settings in self._settings.items():
            record = self._open(name) or (None if ending else self._begin_if_due(name, settings))
            if record is not None:
                more |= self._begin_rollouts(record, settings)
        return more

    def _open(self, name: str) -> EvaluationRecord | None:
        return next((record for record in self._ledger.evaluations.values() if record.name == name), None)

    def _begin_if_due(self, name: str, settings: EvaluationSettings) -> EvaluationRecord | None:
        size, version = self._ledger.state.environments[name].examples, self._served_version()
        position = self._ledger.state.evaluated[name]
        if not size:  # not surveyed yet
            return None
        before = position.version or 0
        due = settings.at_start if position.version is None else version // settings.every > before // settings.every
        if position.version is None or due or version < before:  # a trainer that resumes publishes older versions again
            position.version = version
        if not due:
            return None
        self._ledger.state.evaluations += 1
        record = EvaluationRecord(
            number=self._ledger.state.evaluations,
            name=name,
            version=version,
            examples=size if settings.examples == "all" else min(settings.examples, size),
            rollouts=settings.rollouts,
            started_at=time.time(),
        )
        self._ledger.evaluations[record.number] = record
        self._ledger.keep("evaluations", record)
        logger.info("action=evaluation_begins name=%s version=%d rollouts=%d", name, version, record.size)
        return record

    def _begin_rollouts(self, record: EvaluationRecord, settings: EvaluationSettings) -> bool:
        """As many as its share of the rollouts in flight allows."""
        limit = max(1, int(settings.share * self._max_in_flight))
        room = min(limit - len(record.open), record.size - record.begun)
        for index in range(record.begun, record.begun + min(room, AT_ONCE)):
            record.open.add(index)
            self._ledger.keep(
                "evaluation_rollouts",
                EvaluationRollout(evaluation=record.number, index=index, state=PlayState.OPEN),
            )
            job = ids.evaluation_rollout(record.number, index)
            self._ledger.add_job(job, EVALUATION, str(record.number))
            self._count(PLANNED)
            record.begun += 1
        return room > AT_ONCE

    # what the groups apply

    def settle(self, job: JobRecord, result: RolloutResult) -> None:
        record, index = self._record(job), ids.RolloutId.parse(job.id).number
        if not self._ledger.state.environments[record.name].scores_groups:
            self._evaluated(record, index, result)
            return
        record.unscored[index] = result
        rollout = EvaluationRollout(
            evaluation=record.number, index=index, state=PlayState.GENERATED, result=result.model_dump_json()
        )
        self._ledger.keep("evaluation_rollouts", rollout)
        self._score_if_complete(record, index // record.rollouts)

    def died(self, job: JobRecord, why: str) -> None:
        """The attempts of a rollout are used up: the evaluation is without it. Those of a score: without its
        rollouts."""
        record, error = self._record(job), orjson.dumps({"error": shortened(why)}).decode()
        if job.stage == EVALUATION_SCORE:
            for index in self._unscored(record, job):
                self._ledger.unwanted_blobs += record.unscored.pop(index).keys
                self._close(record, index, PlayState.DEAD, error)
            return
        index = ids.RolloutId.parse(job.id).number
        self._close(record, index, PlayState.DEAD, error)
        self._score_if_complete(record, index // record.rollouts)

    def score_inputs(self, job: JobRecord) -> GroupInputs:
        record = self._record(job)
        members = [(ids.evaluation_rollout(record.number, index), index) for index in self._unscored(record, job)]
        return GroupInputs(
            group=job.id,
            environment=record.name,
            example=_example(job),
            policy_version=self._ledger.state.policy_version,
            members={id: record.unscored[index] for id, index in members},
        )

    def scored(self, job: JobRecord, rewards: Mapping[str, float], parts: Mapping[str, Mapping[str, float]]) -> None:
        record = self._record(job)
        for index in self._unscored(record, job):
            id = ids.evaluation_rollout(record.number, index)
            named = {name: values[id] for name, values in parts.items() if id in values}
            update = {"reward": rewards[id]} | ({"rewards": named} if named else {})
            self._evaluated(record, index, record.unscored.pop(index).model_copy(update=update))

    def fits(self, job: JobRecord, rewards: Mapping[str, float]) -> bool:
        record = self._record(job)
        wanted = {ids.evaluation_rollout(record.number, index) for index in self._unscored(record, job)}
        return rewards.keys() >= wanted

    def _record(self, job: JobRecord) -> EvaluationRecord:
        return self._ledger.evaluations[int(job.subject)]

    def _unscored(self, record: EvaluationRecord, job: JobRecord) -> list[int]:
        return [index for index in record.of_example(_example(job)) if index in record.unscored]

    def _score_if_complete(self, record: EvaluationRecord, example: int) -> None:
        """Add the job that scores the example when none of its rollouts is played any more."""
        indices = record.of_example(example)
        waiting = [index for index in indices if index in record.unscored]
        if (
            waiting
            and indices.stop <= record.begun
            and all(index in waiting for index in indices if index in record.open)
        ):
            job = ids.evaluation_score(record.number, example)
            self._ledger.add_job(job, EVALUATION_SCORE, str(record.number))

    def _evaluated(self, record: EvaluationRecord, index: int, result: RolloutResult) -> None:
        self._ledger.unwanted_blobs += result.keys
        record.scores[index] = kept(result)
        self._close(record, index, PlayState.EVALUATED, orjson.dumps(record.scores[index]).decode())

    def _close(self, record: EvaluationRecord, index: int, state: PlayState, result: str) -> None:
        record.open.discard(index)
        self._ledger.keep(
            "evaluation_rollouts",
            EvaluationRollout(evaluation=record.number, index=index, state=state, result=result),
        )
        self._count(state.value)
        if record.begun == record.size and not record.open:
            self._finish(record)

    def _finish(self, record: EvaluationRecord) -> None:
        found = values(record, now=time.time())
        self._ledger.state.evaluations_finished += 1
        record.finished = self._ledger.state.evaluations_finished
        position = self._ledger.state.evaluated[record.name]
        position.last = {"evaluation": record.finished, "name": record.name, **found}
        position.unreported = found
        record.result = orjson.dumps(position.last).decode()
        self._end(record, EvaluationState.DONE)
        logger.info("action=evaluated name=%s %s", record.name, " ".join(f"{k}={v:g}" for k, v in found.items()))

    def _end(self, record: EvaluationRecord, state: EvaluationState) -> None:
        record.state = state
        self._ledger.keep("evaluations", record)
        self._ledger.keep("closed_evaluations", ClosedEvaluation(number=record.number))
        self._ledger.evaluations.pop(record.number)

    def _count(self, state: str) -> None:
        numbers = self._ledger.state.evaluation_rollouts
        self._ledger.state.evaluation_rollouts = numbers | {state: numbers.get(state, 0) + 1}

    # what the end of a run and an update of the weights wait for

    def awaited_at_end(self) -> bool:
        """Call when the last step is delivered: whether an open evaluation still has time (`hold_s`)."""
        self._ending_since = self._ending_since or time.monotonic()
        return bool(self._held(self._ending_since))

    def holds_update(self) -> bool:
        """Call while other weights wait to be loaded: whether an open evaluation still has time. Those that are due for
        the present version begin first."""
        if self._update_since is None:
            self.plan()
            self._update_since = time.monotonic()
        held = bool(self._held(self._update_since))
        if not held:
            self._update_since = None
        return held

    def _held(self, since: float) -> list[EvaluationRecord]:
        waited_s = time.monotonic() - since
        return [each for each in self._ledger.evaluations.values() if waited_s < self._settings[each.name].hold_s]

    def cancel(self) -> None:
        """The run has ended."""
        for record in list(self._ledger.evaluations.values()):
            self._cancel(record, "the run has ended")

    def _cancel(self, record: EvaluationRecord, why: str) -> None:
        logger.warning("action=evaluation_cancelled name=%s version=%d %s", record.name, record.version, why)
        self._ledger.event(f"evaluation {record.number}", "cancelled", f"{record.name}: {why}")
        of_evaluations = (EVALUATION, EVALUATION_SCORE)
        jobs = [job for job in self._ledger.jobs.values() if job.stage in of_evaluations]
        for job in [job for job in jobs if job.subject == str(record.number)]:
            self._ledger.end(job, JobState.CANCELLED)
        for index in sorted(record.open):
            if index in record.unscored:
                self._ledger.unwanted_blobs += record.unscored.pop(index).keys
            self._ledger.keep(
                "evaluation_rollouts",
                EvaluationRollout(evaluation=record.number, index=index, state=PlayState.CANCELLED),
            )
            self._count(PlayState.CANCELLED.value)
        record.open.clear()
        self._end(record, EvaluationState.CANCELLED)

    # what status and metrics show

    def status(self) -> dict[str, Any]:
        """`names`: the last result of each and what is running. `rollouts`: planned = evaluated + dead + cancelled + in
        flight."""
        if not self._settings:
            return {}
        numbers = self._ledger.state.evaluation_rollouts
        planned, counts = numbers.get(PLANNED, 0), {state.value: numbers.get(state.value, 0) for state in COUNTED}
        in_flight = sum(len(record.open) for record in self._ledger.evaluations.values())
        return {
            "rollouts": {
                "planned": planned,
                **counts,
                "in_flight": in_flight,
                "balanced": planned == sum(counts.values()) + in_flight,
            },
            "names": {name: self._status_of(name) for name in self._settings},
        }

    def _status_of(self, name: str) -> dict[str, Any]:
        record = self._open(name)
        return {
            "last": self._ledger.state.evaluated[name].last,
            "running": {"version": record.version, "settled": record.begun - len(record.open), "of": record.size}
            if record
            else None,
        }


def _example(job: JobRecord) -> int:
    """Of the job that scores it."""
    return int(job.id.rpartition("-e")[2])


def unreported(ledger: Ledger) -> dict[str, float]:
    """Values of the evaluations that ended since the last step, for its line in metrics.jsonl. Call in the transaction
    that delivers the step: the next line does not have them."""
    found: dict[str, float] = {}
    for name, position in ledger.state.evaluated.items():
        found |= {f"evaluation/{name}/{key}": value for key, value in (position.unreported or {}).items()}
        if position.unreported:
            position.unreported = None
    return found

"""Evaluations: examples that are played every few policy versions and never trained on.

Each example is a group with the purpose `evaluation`. Its groups stay open until all of them are done, and are closed
with its result. One evaluation of each name is open at a time.
"""

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import orjson

from headpond.config import RunConfig
from headpond.ledger.states import IN_FLIGHT, GroupState, Purpose, RolloutState
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import SOLVED, GroupRecord
from headpond.records.rollout import RolloutResult

logger = logging.getLogger("headpond.evaluation")

AT_ONCE = 32  # rollouts that begin between two waits of the loop
NAMES_MOST = 64  # of the environment's own rewards and metrics, as for steps
ENDS = ("evaluated", "dead", "cancelled")
UNREPORTED = ("evaluation", "name")  # keys of evaluations.jsonl that metrics.jsonl does not have


class Evaluations:
    def __init__(self, config: RunConfig, ledger: Ledger, *, served_version: Callable[[], int] | None = None) -> None:
        """`served_version`: of the engine's weights, which may be older than the published ones."""
        self._settings = config.evaluation
        self._max_in_flight = config.rollouts.max_in_flight
        self._ledger = ledger
        self._ending_since: float | None = None
        self._update_since: float | None = None
        self._served_version = served_version or (lambda: ledger.state.policy_version)

    def cancel(self, names: Iterable[str], why: str) -> None:
        for name in names:
            row = self._ledger.state.evaluated[name]
            logger.warning("action=evaluation_cancelled name=%s version=%s %s", name, row.version, why)
            self._ledger.event(name, "cancelled", f"version {row.version}: {why}")
            for group in self._groups(name):
                self._ledger.cancel(group, why)
            row.examples = 0

    def resume(self) -> None:
        """Cancel those that are no longer configured."""
        self.cancel(self.open - self._settings.keys(), "not configured any more")

    @property
    def open(self) -> set[str]:
        return {name for name, row in self._ledger.state.evaluated.items() if row.examples}

    def _groups(self, name: str) -> list[GroupRecord]:
        return [group for group in self._ledger.evaluation_groups.values() if group.environment == name]

    def plan(self, *, ending: bool = False) -> bool:
        """Begin the evaluations that are due, unless the run is `ending`, and groups of the open ones. True when more
        could begin at once."""
        for name in self._settings.keys() - self.open if not ending else ():
            self._begin_if_due(name)
        return any(self._begin_groups(name) for name in sorted(self.open))

    def _begin_if_due(self, name: str) -> None:
        settings, row, version = self._settings[name], self._ledger.state.evaluated[name], self._served_version()
        size = self._ledger.state.environments[name].examples
        if not size:  # not surveyed yet
            return
        last = row.version
        due = settings.at_start if last is None else version // settings.every > last // settings.every
        if last is None or due or version < last:  # a trainer that resumes publishes older versions again
            row.version = version
        if due:
            row.examples = size if settings.examples == "all" else min(settings.examples, size)
            row.rollouts, row.begun, row.started_at = settings.rollouts, 0, time.time()
            logger.info("action=evaluation_begins name=%s version=%d examples=%d", name, version, row.examples)

    def _begin_groups(self, name: str) -> bool:
        """As many as its share of the rollouts in flight allows."""
        row = self._ledger.state.evaluated[name]
        most = max(1, int(self._settings[name].share * self._max_in_flight) // row.rollouts)
        room = min(most - self._ledger.unfinished[name], row.examples - row.begun)
        at_once = max(1, AT_ONCE // row.rollouts)
        for _ in range(min(room, at_once)):
            self._ledger.plan(environment=name, example=row.begun, size=row.rollouts, purpose=Purpose.EVALUATION)
            row.begun += 1
        return room > at_once

    def scored(self, group: GroupRecord) -> None:
        """The last stage of the group is done. Its rollouts without a score are dead."""
        for rollout in group.of(RolloutState.GENERATED):
            self._ledger.move(rollout, RolloutState.EVALUATED)
        self._ledger.enter(group, GroupState.EVALUATED)
        row = self._ledger.state.evaluated[group.environment]
        if row.begun == row.examples and not self._ledger.unfinished[group.environment]:
            self._finish(group.environment)

    def _finish(self, name: str) -> None:
        state, row, groups = self._ledger.state, self._ledger.state.evaluated[name], self._groups(name)
        played = [[r.result for r in group.rollouts if r.result and r.reason is None] for group in groups]
        scores = sum(map(len, played))
        state.evaluations_finished += 1
        row.last = {
            "evaluation": state.evaluations_finished,
            "name": name,
            "version": row.version,
            "time": int(time.time()),
            "duration_s": rounded(time.time() - row.started_at),
            "examples": row.examples,
            "rollouts": scores,
            "dead": row.examples * row.rollouts - scores,
            **values(played),
        }
        state.evaluation_lines[str(state.evaluations_finished)].line = orjson.dumps(row.last).decode()
        row.examples, row.is_reported = 0, False
        self._ledger.enter_all(groups, GroupState.CLOSED)
        logger.info("action=evaluated %s", " ".join(f"{key}={value}" for key, value in row.last.items()))

    # what the end of a run and an update of the weights wait for

    def awaited_at_end(self) -> bool:
        """Call when the last step is delivered: whether an open evaluation still has time (`hold_s`)."""
        self._ending_since = self._ending_since or time.monotonic()
        return self._holds(self._ending_since)

    def holds_update(self) -> bool:
        """Call while other weights wait to be loaded: whether an open evaluation still has time. Those that are due for
        the present version begin first."""
        if self._update_since is None:
            self.plan()
            self._update_since = time.monotonic()
        holds = self._holds(self._update_since)
        if not holds:
            self._update_since = None
        return holds

    def _holds(self, since: float) -> bool:
        return any(time.monotonic() - since < self._settings[name].hold_s for name in self.open)

    # what status and metrics show

    def status(self) -> dict[str, Any]:
        """`names`: the last result of each and what is running. `rollouts`: planned = evaluated + dead + cancelled + in
        flight."""
        if not self._settings:
            return {}
        counts = {name: self._ledger.evaluation_rollouts[name] for name in ("planned", *ENDS)}
        in_flight = Counter[str]()
        for group in self._ledger.evaluation_groups.values():
            if group.state != GroupState.EVALUATED:
                in_flight[group.environment] += len(group.of(*IN_FLIGHT))
        return {
            "rollouts": {
                **counts,
                "in_flight": in_flight.total(),
                "balanced": counts["planned"] == sum(counts[end] for end in ENDS) + in_flight.total(),
            },
            "names": {name: self._status_of(name, in_flight[name]) for name in self._settings},
        }

    def _status_of(self, name: str, in_flight: int) -> dict[str, Any]:
        row = self._ledger.state.evaluated[name]
        settled, size = row.begun * row.rollouts - in_flight, row.examples * row.rollouts
        return {
            "last": row.last,
            "running": {"version": row.version, "settled": settled, "of": size} if row.examples else None,
        }


def unreported(ledger: Ledger) -> dict[str, float]:
    """Values of the evaluations that ended since the last step, for its line in metrics.jsonl. Call in the transaction
    that delivers the step: the next line does not have them."""
    found: dict[str, float] = {}
    for name, row in ledger.state.evaluated.items():
        if row.last and not row.is_reported:
            row.is_reported = True
            found |= {f"evaluation/{name}/{key}": value for key, value in row.last.items() if key not in UNREPORTED}
    return found


def values(played: Sequence[Sequence[RolloutResult]]) -> dict[str, float]:
    """Flat, six significant digits: over the results of each example. Nothing if every rollout died."""
    results = [result for example in played for result in example]
    if not results:
        return {}
    rewards = [result.reward for result in results]
    mean = _mean(rewards)
    named: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for folder, parts in (("rewards", result.rewards), ("metrics", result.metrics)):
            for name, value in parts.items():
                named[f"{folder}/{name}"].append(value)
    found = {
        "version_first": min(result.version_first for result in results),
        "version_last": max(result.version_last for result in results),
        "reward_mean": mean,
        "reward_std": math.hypot(*(reward - mean for reward in rewards)) / math.sqrt(len(rewards)),
        "solved_rate": _mean(reward >= SOLVED for reward in rewards),
        "solved_any_rate": _mean(max(result.reward for result in example) >= SOLVED for example in played if example),
        "completion_tokens": _mean(result.completion_tokens for result in results),
        "truncated_rate": _mean(result.truncated for result in results),
        "policy_error_rate": _mean(result.policy_error is not None for result in results),
        **{name: _mean(named[name]) for name in sorted(named)[:NAMES_MOST]},
    }
    return {key: rounded(value) for key, value in found.items()}


def rounded(value: float) -> float:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _mean(numbers: Iterable[float]) -> float:
    numbers = list(numbers)
    try:
        return math.fsum(numbers) / len(numbers)
    except OverflowError:  # no float holds the sum
        return math.fsum(number / len(numbers) for number in numbers)

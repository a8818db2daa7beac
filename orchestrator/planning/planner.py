"""Plans groups: what the next steps need of each environment, within the limits on rollouts in flight and storage."""

import math
from collections import Counter

from headpond.config import RunConfig
from headpond.errors import RunError
from headpond.orchestrator.duties.housekeeping import Troubles
from headpond.orchestrator.examples.choice import Examples
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.pipeline import Pipeline
from headpond.orchestrator.planning.phase import RunPhase
from headpond.orchestrator.planning.quotas import in_groups, leftover, quotas
from headpond.orchestrator.serving.concurrency import InFlightLimit
from headpond.orchestrator.submission import AT_ONCE
from headpond.orchestrator.trainer import Trainer


class Planner:
    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        trainer: Trainer,
        pipeline: Pipeline,
        limit: InFlightLimit | None = None,
        phase: RunPhase | None = None,
        troubles: Troubles | None = None,
    ) -> None:
        """`limit`: what the engine can serve; by default `rollouts.max_in_flight`. It is noted until the run ends."""
        self._limit = limit or InFlightLimit.of(config)
        self._pipeline = pipeline
        self._config = config
        self._ledger = ledger
        self._trainer = trainer
        self._examples = Examples(config, ledger)
        troubles = troubles or Troubles()
        troubles.add(self.troubles)
        troubles.notes.add(lambda: self._limit.notes() if phase and not phase.ends else [])
        troubles.notes.add(lambda: self._examples.poison.notes(config.environments))

    def resume(self) -> None:
        """Begin a new count of dropped groups: the settings may have been corrected."""
        self._ledger.state.dropped_in_a_row = 0
        self._pipeline.draw.resume()

    def plan(self) -> bool:
        """Begin groups, including those that replace dropped ones. True when more could begin at once.

        Plan at most one submission's worth: each rollout is then written to the ledger once, as submitted.
        """
        self._stop_if_everything_is_dropped()
        self._pipeline.draw.begin(self.groups_per_step)
        size = self._config.rollouts.group_size
        room = (self._limit.value - self._ledger.ungenerated) // size
        missing = self._missing()
        wanted = min(sum(missing.values()), room)
        for _ in range(min(wanted, max(1, AT_ONCE // size))):
            name = max(missing, key=lambda name: (missing[name], name))
            missing[name] -= 1
            if (example := self._examples.take(name)) is not None:
                self._ledger.plan(environment=name, example=example, size=size)
        return wanted > max(1, AT_ONCE // size)

    def troubles(self) -> list[str]:
        """Why no group begins although steps are needed."""
        because = self._trainer.holds_because
        if not self._store_is_full or not self._trainer_holds_blobs or because is None:
            return []
        holds = f"the store holds {self._stored_gb:.1f} GB of {self._config.max_store_gb:g} (max_store_gb)"
        return [f"{holds}, and no rollout begins: {because}"]

    @property
    def _stored_gb(self) -> float:
        return (self._ledger.state.open_bytes + self._ledger.state.delivered_bytes) / 1e9

    @property
    def _store_is_full(self) -> bool:
        return self._config.max_store_gb is not None and self._stored_gb >= self._config.max_store_gb

    def _missing(self) -> Counter[str]:
        """environment -> groups to begin, for the surveyed environments."""
        first = self._ledger.state.steps_delivered + len(self._ledger.batches)
        steps = range(first, min(self._config.steps, self._trainer.plannable_steps(first), self._storable_steps(first)))
        needed, left = Counter[str](), leftover(self._config, self._ledger, self._examples)
        for step in steps:
            if self._pipeline.weights.may_begin(step):
                parts = quotas(self._config, step, left)
                needed.update(parts)
                left = {name: number - parts[name] for name, number in left.items()}
        known = [name for name in needed if self._ledger.state.environments[name].examples]
        oversample, open_groups = self._config.rollouts.oversample, self._open_groups()
        wanted = {name: oversample * self._in_groups(name, needed[name]) - open_groups[name] for name in known}
        most = {name: min(groups, self._examples.ready(name)) for name, groups in wanted.items()}
        return Counter({name: max(0, math.ceil(groups)) for name, groups in most.items()})

    def _storable_steps(self, first: int) -> int:
        """A full store stops planning, except for the next step when no delivered step can be released before it."""
        if not self._store_is_full:
            return self._config.steps
        return first if self._trainer_holds_blobs else first + 1

    @property
    def _trainer_holds_blobs(self) -> bool:
        """Not those of `trainer.keep_steps`, which only later steps release."""
        unreleased = self._trainer.last_released < self._ledger.state.steps_delivered - 1
        return unreleased and self._ledger.state.delivered_bytes > 0

    def _open_groups(self) -> dict[str, float]:
        """environment -> open groups. Admitted ones may be partial and count by their quantity."""
        pending = self._ledger.unfinished
        admitted, unit = self._ledger.admitted, self._config.batch.unit
        return {name: pending[name] + self._in_groups(name, admitted[name, unit]) for name in self._config.environments}

    def _in_groups(self, environment: str, amount: float) -> float:
        groups = in_groups(self._config, self._ledger, environment, amount)
        # Until the first groups are admitted, their length is unknown: begin as many as may be in flight.
        return groups if groups is not None else self._config.rollouts.max_in_flight

    def groups_per_step(self) -> float:
        step = self._ledger.state.steps_delivered
        return sum(self._in_groups(name, quota) for name, quota in quotas(self._config, step).items())

    def _stop_if_everything_is_dropped(self) -> None:
        dropped = self._ledger.state.dropped_in_a_row
        if dropped and dropped >= self._config.batch.max_empty_batches * self.groups_per_step():
            raise RunError(
                f"stopped after {dropped} groups without a usable rollout. {self._pipeline.causes.explain()}"
            )

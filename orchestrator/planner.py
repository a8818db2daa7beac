"""Which groups to begin: what the steps in sight need of each environment, as fast as the limits in flight allow."""

import math
import operator
from collections import Counter

from orchestrator.ledger.ledger import Ledger
from orchestrator.quotas import quotas, weight
from orchestrator.submission import AT_ONCE
from orchestrator.trainer import Trainer
from penstock import ids
from penstock.config import RunConfig
from penstock.errors import RunError
from penstock.ledger.states import GroupState, JobKind


class Planner:
    def __init__(self, config: RunConfig, ledger: Ledger, trainer: Trainer) -> None:
        self._config = config
        self._ledger = ledger
        self._trainer = trainer

    def survey(self) -> None:
        """Ask the workers for the size of every environment that is not known yet."""
        asked = {job.subject for job in self._ledger.jobs.values() if job.kind is JobKind.SURVEY}
        for name in self._config.environments.keys() - asked:
            if f"examples:{name}" not in self._ledger.meta:
                # A name of its own for every start: a job that died is not asked under the same name again.
                self._ledger.add_job(ids.survey_job(self._ledger.number("epoch"), name), JobKind.SURVEY, name)

    def plan(self) -> bool:
        """Begin some groups; True when more could follow at once. This rule alone replaces a group that was dropped.

        As many rollouts as are submitted at once: each is then written down once, as submitted.
        """
        self._stop_if_everything_is_dropped()
        size = self._config.rollouts.group_size
        room = (self._config.rollouts.max_in_flight - self._ledger.ungenerated) // size
        missing = self._missing()
        wanted = min(sum(missing.values()), room)
        for _ in range(min(wanted, max(1, AT_ONCE // size))):
            name = max(missing, key=lambda name: (missing[name], name))
            missing[name] -= 1
            self._begin(name, size)
        return wanted > max(1, AT_ONCE // size)

    def _begin(self, name: str, size: int) -> None:
        """Examples in order, over and over: a group is named by its own number, never by its example."""
        number = self._ledger.count(f"begun:{name}") - 1
        self._ledger.plan(environment=name, example=number % self._ledger.number(f"examples:{name}"), size=size)

    @property
    def trouble(self) -> str | None:
        """Why nothing is begun although the trainer would take it."""
        if not self._store_is_full or not self._ledger.number("delivered_bytes"):
            return None
        return (
            f"the store holds {self._stored_gb:.1f} GB, and may hold {self._config.max_store_gb:g} (max_store_gb): "
            f"nothing is begun until the trainer has {self._config.trainer.release_on} "
            f"step {self._ledger.number('experts_released')}"
        )

    @property
    def _stored_gb(self) -> float:
        return (self._ledger.number("open_bytes") + self._ledger.number("delivered_bytes")) / 1e9

    @property
    def _store_is_full(self) -> bool:
        return self._config.max_store_gb is not None and self._stored_gb >= self._config.max_store_gb

    def _missing(self) -> Counter[str]:
        """environment -> groups to begin, of those that the workers know."""
        first = self._ledger.number("steps_delivered") + len(self._ledger.batches)
        steps = range(first, min(self._config.steps, self._trainer.plannable_steps(first), self._storable_steps(first)))
        needed = Counter[str]()
        for step in steps:
            needed.update(quotas(self._config, step))
        known = [name for name in needed if self._ledger.meta.get(f"examples:{name}")]
        oversample, open_groups = self._config.rollouts.oversample, self._open_groups()
        wanted = {name: oversample * self._in_groups(needed[name]) - open_groups[name] for name in known}
        return Counter({name: max(0, math.ceil(groups)) for name, groups in wanted.items()})

    def _storable_steps(self, first: int) -> int:
        """In a full store nothing is begun, except what the next step lacks when nothing can be released before it."""
        if not self._store_is_full:
            return self._config.steps
        return first if self._ledger.number("delivered_bytes") else first + 1

    def _open_groups(self) -> dict[str, float]:
        """environment -> groups on their way. Admitted ones count for what is left of them: some are partial."""
        groups = self._ledger.groups.values()
        coming, admitted = Counter[str](), Counter[str]()
        for (environment, state), number in Counter(map(operator.attrgetter("environment", "state"), groups)).items():
            if state not in (GroupState.ADMITTED, GroupState.BATCHED):
                coming[environment] += number
        for group in groups:
            if group.state is GroupState.ADMITTED:
                admitted[group.environment] += weight(self._config, group)
        return {name: coming[name] + self._in_groups(admitted[name]) for name in self._config.environments}

    def _in_groups(self, quantity: float) -> float:
        """How many groups hold `quantity` of the batch's unit."""
        if self._config.batch.unit == "groups":
            return quantity
        if self._config.batch.unit == "rollouts":
            return quantity / self._config.rollouts.group_size
        admitted, tokens = self._ledger.number("groups_admitted"), self._ledger.number("tokens_admitted")
        if tokens:
            return quantity * admitted / tokens
        # Until the first groups are in, nobody knows how long they are: begin as many as may be in flight.
        return self._config.rollouts.max_in_flight if quantity else 0

    def groups_per_step(self) -> float:
        return self._in_groups(self._config.batch.size)

    def _stop_if_everything_is_dropped(self) -> None:
        dropped = self._ledger.number("dropped_in_a_row")
        if dropped and dropped >= self._config.batch.max_empty_batches * self.groups_per_step():
            raise RunError(
                f"{dropped} groups in a row were dropped, enough for {self._config.batch.max_empty_batches} batches: "
                "the run stops. `penstock audit RUN_DIR` shows the reasons; loosen that filter, or look at the rewards"
            )

"""Which groups to begin: as many as the steps still to come need, as fast as the limit on rollouts in flight allows."""

from orchestrator.ledger import Ledger
from orchestrator.states import GroupState
from penstock.config import RunConfig
from penstock.errors import RunError

AT_ONCE = 128  # rollouts: about 2 ms of the loop


class Planner:
    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self._config = config
        self._ledger = ledger

    def plan(self) -> bool:
        """Begin some groups; True when more could follow at once. This rule alone replaces a group that was dropped."""
        self._stop_if_everything_is_dropped()
        size = self._config.rollouts.group_size
        room = (self._config.rollouts.max_in_flight - self._ledger.ungenerated) // size
        wanted = min(self._groups_missing(), room)
        for _ in range(min(wanted, max(1, AT_ONCE // size))):
            self._ledger.plan(
                environment=self._config.environment, example=self._ledger.number("groups_planned"), size=size
            )
        return wanted > AT_ONCE // size

    def groups_per_step(self) -> int:
        batch = self._config.batch
        return batch.size if batch.unit == "groups" else -(-batch.size // self._config.rollouts.group_size)

    def _groups_missing(self) -> int:
        """Groups are all alike to the planner: what partial groups fall short of is planned when it shows."""
        ledger = self._ledger
        steps_to_come = self._config.steps - ledger.number("steps_delivered") - len(ledger.batches)
        unbatched = [group for group in ledger.groups.values() if group.state is not GroupState.BATCHED]
        if self._config.batch.unit == "groups":
            return steps_to_come * self._config.batch.size - len(unbatched)
        rollouts = sum(len(group.rollouts) for group in unbatched)
        return -(-(steps_to_come * self._config.batch.size - rollouts) // self._config.rollouts.group_size)

    def _stop_if_everything_is_dropped(self) -> None:
        limit = self._config.batch.max_empty_batches * self.groups_per_step()
        dropped = self._ledger.number("dropped_in_a_row")
        if dropped >= limit:
            raise RunError(
                f"{dropped} groups in a row were dropped, enough for {self._config.batch.max_empty_batches} batches: "
                "the run stops. `penstock audit RUN_DIR` shows the reasons; loosen that filter, or look at the rewards"
            )

"""The phase of the run: it goes on, it drains or stops by a signal, or it is done."""

from headpond.config import RunConfig
from headpond.orchestrator.duties.housekeeping import Troubles
from headpond.orchestrator.examples.choice import Examples
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.planning.quotas import leftover
from headpond.orchestrator.shutdown import Phase, StopRequests


class RunPhase:
    def __init__(self, config: RunConfig, ledger: Ledger, stop: StopRequests, troubles: Troubles | None = None) -> None:
        self._config = config
        self._ledger = ledger
        self._stop = stop
        self._examples = Examples(config, ledger)
        (troubles or Troubles()).notes.add(lambda: [self.out_of_data])

    def __str__(self) -> str:
        return "done" if self.done else self._stop.phase

    @property
    def running(self) -> bool:
        """Whether no signal has asked the run to stop."""
        return self._stop.phase is Phase.RUNNING

    @property
    def ends(self) -> bool:
        return self.done or not self.running

    @property
    def done(self) -> bool:
        return self._ledger.state.steps_delivered >= self._config.steps or self.out_of_data is not None

    @property
    def out_of_data(self) -> str | None:
        """What to say when every environment has played its epochs and what is left does not fill a step."""
        step, left = self._ledger.state.steps_delivered, leftover(self._config, self._ledger, self._examples)
        if len(left) < len(self._config.environments) or self._ledger.batches or step >= self._config.steps:
            return None
        if sum(left.values()) >= self._config.batch.size:
            return None
        return (
            f"the examples of every environment are used up after {step} of {self._config.steps} steps: raise "
            "environments.NAME.epochs and run the same command to continue"
        )

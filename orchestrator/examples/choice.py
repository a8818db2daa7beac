"""Which example the next group of an environment plays, and when its examples are used up.

Samplers run on compute workers, as jobs (`orchestrator/stages/draw.py`): no code of a user runs on this loop.
"""

import math

from headpond.config import RunConfig
from headpond.data import UNIFORM, Order, example_at
from headpond.errors import RunError
from headpond.orchestrator.examples.poison import Poison
from headpond.orchestrator.ledger.ledger import Ledger


class Examples:
    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self._config = config
        self._state = ledger.state
        # environments whose examples a sampler draws
        self.sampled = [name for name in config.environments if not self.is_uniform(name)]
        self.poison = Poison(config, ledger)

    def size(self, name: str) -> int:
        """0 until the environment has been surveyed."""
        return self._state.environments[name].examples or 0

    def ready(self, name: str) -> float:
        """Groups that may begin now."""
        drawn = math.inf if self.is_uniform(name) else len(self.drawn(name))
        return len(self._state.environments[name].again) + min(self.left(name), drawn)

    def used_up(self, name: str) -> bool:
        environment = self._state.environments[name]
        ended = environment.data_ended and not self.ready(name)
        return self.size(name) > 0 and (ended or not self.left(name)) and not environment.again

    def take(self, name: str) -> int | None:
        """The next example that is not in quarantine; None if there is none. Commit it with the group that plays it."""
        environment = self._state.environments[name]
        if environment.again:
            environment.again.forget(first := next(iter(environment.again)))
            return first
        for _ in range(self.size(name)):
            if not self.left(name) or not (self.is_uniform(name) or self.drawn(name)):
                return None
            if (example := self._take_next(name)) not in environment.quarantined:
                return example
        raise RunError(
            f"every example of {name!r} is in quarantine, because its rollouts die: `headpond dead` says why. Fix it, "
            "then run `headpond dead --retry` and the same command again"
        )

    def _take_next(self, name: str) -> int:
        environment = self._state.environments[name]
        number = environment.begun
        environment.begun += 1
        if not self.is_uniform(name):
            example = self.drawn(name)[0]
            environment.drawn_begun += 1
            return example
        order = self._order(name, begins=number % self.size(name) == 0)
        return example_at(number, size=self.size(name), order=order, seed=self._config.seed, name=name)

    def left(self, name: str) -> float:
        epochs = self._config.environments[name].epochs
        return math.inf if epochs is None else max(0, epochs * self.size(name) - self._state.environments[name].begun)

    def is_uniform(self, name: str) -> bool:
        return self._config.environments[name].sampler == UNIFORM

    def _order(self, name: str, *, begins: bool) -> Order:
        """An epoch keeps the order that it began with, so that no example is skipped or played twice. One that began
        with another sampler goes on in order."""
        environment = self._state.environments[name]
        if begins:
            environment.order = self._config.environments[name].order
        return "shuffled" if environment.order == "shuffled" else "in_order"

    def drawn(self, name: str) -> list[int]:
        """Examples that wait for a group."""
        return self._state.samplers[name].drawn[self._state.environments[name].drawn_begun :]

"""Which example the next group of an environment plays, and when its examples are used up. The state is in the ledger.

`begun:NAME` counts the groups that an environment has begun, and with it the position in its order; `order:NAME` is the
order of the present epoch.
"""

import math

from orchestrator.ledger.ledger import Ledger
from penstock.config import RunConfig
from penstock.sampling import Order, example_at


class Examples:
    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self._config = config
        self._ledger = ledger

    def size(self, name: str) -> int:
        """0 until the environment has been surveyed."""
        return self._ledger.number(f"examples:{name}")

    def left(self, name: str) -> float:
        """Groups that may still begin."""
        epochs = self._config.environments[name].epochs
        return math.inf if epochs is None else max(0, epochs * self.size(name) - self._ledger.number(f"begun:{name}"))

    def used_up(self, name: str) -> bool:
        return self.size(name) > 0 and not self.left(name)

    def take(self, name: str) -> int:
        """The next example. Commit it with the group that plays it."""
        number = self._ledger.increment(f"begun:{name}") - 1
        order = self._order(name, begins=number % self.size(name) == 0)
        return example_at(number, size=self.size(name), order=order, seed=self._config.seed, name=name)

    def _order(self, name: str, *, begins: bool) -> Order:
        """An epoch keeps the order that it began with, so that no example is skipped or played twice. Releases that
        recorded none played in order."""
        if begins:
            self._ledger.set(f"order:{name}", self._config.environments[name].order)
        return "shuffled" if self._ledger.meta.get(f"order:{name}") == "shuffled" else "in_order"

"""Whether what was delivered is distributed as what was planned, over many schedules."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from headpond.ids import GroupId, RolloutId
from simulation.workers import length_of, reward_of
from simulation.world import World

BY_LENGTH = ("stale", "group_timeout")
"""reasons that drop long rollouts by their definition"""


@dataclass
class Deviation:
    """How far the delivered values are above the planned ones, in standard deviations of a fair draw."""

    schedules: int = 0
    difference: float = 0.0
    variance: float = 0.0

    def add(self, planned: list[float], delivered: list[float]) -> None:
        mean = sum(planned) / len(planned)
        variance = sum((value - mean) ** 2 for value in planned) / max(1, len(planned) - 1)
        self.schedules += 1
        self.difference += sum(delivered) - len(delivered) * mean
        self.variance += variance * len(delivered) * (1 - len(delivered) / len(planned))

    @property
    def z(self) -> float:
        return self.difference / math.sqrt(self.variance) if self.variance else 0.0


class Bias:
    def __init__(self) -> None:
        self.rewards, self.lengths = Deviation(), Deviation()

    def add(self, world: World) -> None:
        """Every group up to the last delivered one had its turn. A wider window, or none, prefers short rollouts."""
        if not world.delivered or world.ledger_lost:
            return
        last = max(GroupId.parse(RolloutId.parse(rollout).group).ordinal for rollout in world.delivered)
        size = world.config.rollouts.group_size
        planned = [str(RolloutId(str(GroupId(group)), index)) for group in range(1, last + 1) for index in range(size)]
        self._add(self.rewards, reward_of, world, planned)
        batch = world.config.batch
        if batch.order == "planned-window" and batch.window == 1.0 and not world.reasons.keys() & set(BY_LENGTH):
            self._add(self.lengths, lambda seed, rollout: math.log(length_of(seed, rollout)), world, planned)

    @staticmethod
    def _add(to: Deviation, value: Callable[[int, str], float], world: World, planned: list[str]) -> None:
        if len(world.delivered) < len(planned):
            to.add(*([value(world.seed, rollout) for rollout in rollouts] for rollouts in (planned, world.delivered)))

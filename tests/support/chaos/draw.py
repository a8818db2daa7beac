"""Which faults a schedule plays, in which world: a pure function of the seed and the schedule's number.

Faults that were drawn less often before are drawn first, so that N schedules play each about as often.
"""

import random
from collections import Counter
from dataclasses import dataclass

from support.chaos.faults import FAULTS, IN_WORLDS

FAULTS_EACH = 10
CYCLE = ("noop", "agents", "noop", "agents", "engine")
"""Worlds of five schedules in a row."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    number: int
    seed: int
    world: str
    faults: tuple[str, ...]


def schedules(seed: int, rounds: int, faults_each: int = FAULTS_EACH) -> list[Schedule]:
    drawn = Counter[str]()
    found: list[Schedule] = []
    for number in range(rounds):
        chance = random.Random(f"{seed}/{number}")
        world = CYCLE[number % len(CYCLE)]
        names = [name for name in FAULTS if world in IN_WORLDS[name]]
        names.sort(key=lambda name: (drawn[name], chance.random()))
        faults = names[:faults_each]
        chance.shuffle(faults)
        drawn.update(faults)
        found.append(Schedule(number=number, seed=seed, world=world, faults=tuple(faults)))
    return found

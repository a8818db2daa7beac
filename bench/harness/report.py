"""The result of a benchmark: figures, targets, number of rounds and the machine's load."""

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Target:
    """`value` must be at most (or at least) `limit`."""

    name: str
    value: float
    limit: float
    sense: Literal["at most", "at least"] = "at most"

    @property
    def met(self) -> bool:
        return self.value <= self.limit if self.sense == "at most" else self.value >= self.limit


@dataclass(frozen=True, kw_only=True)
class Report:
    bench: str
    figures: dict[str, float]
    targets: list[Target]
    rounds: int
    quick: bool = False
    load: list[float] = field(default_factory=lambda: list(os.getloadavg()))

    @property
    def met(self) -> bool:
        return all(target.met for target in self.targets)

    def as_dict(self) -> dict[str, object]:
        report = asdict(self)
        report["targets"] = [asdict(target) | {"met": target.met} for target in self.targets]
        return report


def median(values: Sequence[float]) -> float:
    return statistics.median(values)

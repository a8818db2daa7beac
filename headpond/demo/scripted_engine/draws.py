"""Random draws as a pure function of a seed and a name: the same in any order and any process. No generator state."""

import math
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist

import xxhash

from headpond.errors import ConfigError

NORMAL = NormalDist()


class Draws:
    """Draws by name, so that one more draw does not change the others."""

    def __init__(self, *parts: bytes) -> None:
        hashed = xxhash.xxh3_64()
        for part in parts:
            hashed.update(len(part).to_bytes(8, "little") + part)
        self.seed = hashed.intdigest()

    def uniform(self, name: str) -> float:
        """In the open interval (0, 1)."""
        return ((self._number(name) >> 11) + 0.5) / 2**53

    def integer(self, name: str, low: int, high: int) -> int:
        """From `low` to `high`, inclusive."""
        return low + self._number(name) % (high - low + 1)

    def _number(self, name: str) -> int:
        return xxhash.xxh3_64_intdigest(name.encode(), self.seed)


class Shape(StrEnum):
    CONSTANT = "constant"
    UNIFORM = "uniform"
    LOGNORMAL = "lognormal"


PARAMETERS = {Shape.CONSTANT: 1, Shape.UNIFORM: 2, Shape.LOGNORMAL: 2}
SYNTAX = "constant:VALUE, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA"


@dataclass(frozen=True)
class Distribution:
    """A distribution of non-negative numbers, evaluated by quantile."""

    shape: Shape
    parameters: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "Distribution":
        name, *numbers = text.split(":")
        try:
            shape, parameters = Shape(name), tuple(float(number) for number in numbers)
        except ValueError:
            raise ConfigError(f"{text!r} is not a distribution: write {SYNTAX}") from None
        if len(parameters) != PARAMETERS[shape] or not all(0 <= number < math.inf for number in parameters):
            raise ConfigError(f"{text!r} is not a distribution: write {SYNTAX}, with non-negative numbers")
        return cls(shape, parameters)

    def at(self, share: float) -> float:
        """The quantile at `share`."""
        match self.shape, self.parameters:
            case Shape.UNIFORM, (low, high):
                return low + share * (high - low)
            case Shape.LOGNORMAL, (median, sigma):
                return median * math.exp(sigma * NORMAL.inv_cdf(share))
            case _:
                return self.parameters[0]

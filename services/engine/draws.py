"""Chance that is a pure function of its seed: asking again, in any order and in any process, gives the same."""

import math
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist

import xxhash

from penstock.errors import ConfigError

NORMAL = NormalDist()


class Draws:
    """Numbers known by name, so that drawing one more changes no other."""

    def __init__(self, *parts: bytes) -> None:
        hashed = xxhash.xxh3_64()
        for part in parts:
            hashed.update(len(part).to_bytes(8, "little") + part)
        self.seed = hashed.intdigest()

    def uniform(self, name: str) -> float:
        """Between 0 and 1, never one of them."""
        return ((self._number(name) >> 11) + 0.5) / 2**53

    def integer(self, name: str, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        return low + self._number(name) % (high - low + 1)

    def _number(self, name: str) -> int:
        return xxhash.xxh3_64_intdigest(name.encode(), self.seed)


class Shape(StrEnum):
    CONSTANT = "constant"
    UNIFORM = "uniform"
    LOGNORMAL = "lognormal"


PARAMETERS = {Shape.CONSTANT: 1, Shape.UNIFORM: 2, Shape.LOGNORMAL: 2}
WRITTEN = "constant:VALUE, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA"


@dataclass(frozen=True)
class Distribution:
    """A distribution of numbers that are not negative, by its quantiles."""

    shape: Shape
    parameters: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "Distribution":
        name, *numbers = text.split(":")
        try:
            shape, parameters = Shape(name), tuple(float(number) for number in numbers)
        except ValueError:
            raise ConfigError(f"{text!r} is not a distribution: write {WRITTEN}") from None
        if len(parameters) != PARAMETERS[shape] or not all(0 <= number < math.inf for number in parameters):
            raise ConfigError(f"{text!r} is not a distribution: write {WRITTEN}, with numbers that are not negative")
        return cls(shape, parameters)

    def at(self, share: float) -> float:
        """The value below which `share` of the draws lie."""
        match self.shape, self.parameters:
            case Shape.UNIFORM, (low, high):
                return low + share * (high - low)
            case Shape.LOGNORMAL, (median, sigma):
                return median * math.exp(sigma * NORMAL.inv_cdf(share))
            case _:
                return self.parameters[0]

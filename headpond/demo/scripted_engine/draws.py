"""Random draws as a pure function of a seed and a name: the same in any order and any process. No generator state."""

import math
from collections.abc import Callable
from dataclasses import dataclass
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
        """Draw from the open interval (0, 1)."""
        return ((self._number(name) >> 11) + 0.5) / 2**53

    def integer(self, name: str, low: int, high: int) -> int:
        """Draw from `low` to `high`, both included."""
        return low + self._number(name) % (high - low + 1)

    def _number(self, name: str) -> int:
        return xxhash.xxh3_64_intdigest(name.encode(), self.seed)


# Name -> number of parameters, and the quantile at a share.
SHAPES: dict[str, tuple[int, Callable[..., float]]] = {
    "constant": (1, lambda share, value: value),
    "uniform": (2, lambda share, low, high: low + share * (high - low)),
    "lognormal": (2, lambda share, median, sigma: median * math.exp(sigma * NORMAL.inv_cdf(share))),
}
SYNTAX = "constant:VALUE, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA"


@dataclass(frozen=True)
class Distribution:
    """A distribution of non-negative numbers, evaluated by quantile."""

    shape: str
    parameters: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "Distribution":
        shape, *numbers = text.split(":")
        try:
            parameters = tuple(map(float, numbers))
            count, _ = SHAPES[shape]
        except (ValueError, KeyError):
            raise ConfigError(f"{text!r} is not a distribution: write {SYNTAX}") from None
        if len(parameters) != count or not all(0 <= number < math.inf for number in parameters):
            raise ConfigError(f"{text!r} is not a distribution: write {SYNTAX}, with non-negative numbers")
        return cls(shape, parameters)

    def at(self, share: float) -> float:
        """Return the quantile at `share`."""
        _, quantile = SHAPES[self.shape]
        return quantile(share, *self.parameters)

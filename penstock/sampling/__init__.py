"""Which example is played next: an order of its own for every epoch."""

from penstock.sampling.order import Order, example_at

__all__ = ["Order", "example_at"]

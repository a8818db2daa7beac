"""How a step's size is shared out among the environments: by weight, whole numbers, the same on every machine."""

from collections.abc import Mapping

from penstock.config import RunConfig


def quotas(config: RunConfig, step: int) -> dict[str, int]:
    """environment -> its part of the step's `batch.size`. Remainders go round, so that no environment is favoured."""
    return apportion(config.batch.size, {name: env.weight for name, env in config.environments.items()}, turn=step)


def apportion(size: int, weights: Mapping[str, float], *, turn: int = 0) -> dict[str, int]:
    """By largest remainder; equal remainders are served in an order that moves on with `turn`."""
    total = sum(weights.values())
    exact = {name: size * weight / total for name, weight in weights.items()}
    shares = {name: int(share) for name, share in exact.items()}
    names = sorted(weights)
    in_turn = names[turn % len(names) :] + names[: turn % len(names)]
    by_remainder = sorted(in_turn, key=lambda name: shares[name] - exact[name])
    for name in by_remainder[: size - sum(shares.values())]:
        shares[name] += 1
    return shares

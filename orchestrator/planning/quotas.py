"""Quotas: the size of a step divided among the environments, and what a group adds to it."""

import math
from collections.abc import Mapping

from headpond.config import RunConfig
from headpond.ledger.states import RolloutState
from headpond.orchestrator.examples.choice import Examples
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import GroupRecord


def quotas(config: RunConfig, step: int, most: Mapping[str, int] | None = None) -> dict[str, int]:
    """environment -> its part of `batch.size`. Remainders rotate with the step, so that no environment is favoured.

    `most`: what the environments have left whose examples are used up. The others take their place; where there is no
    other, the parts are smaller than the step.
    """
    size, weights = config.batch.size, {name: env.weight for name, env in config.environments.items()}
    parts: dict[str, int] = {}
    while weights:
        shares = apportion(size, weights, turn=step)
        short = {name: most[name] for name in shares if shares[name] > most.get(name, math.inf)} if most else {}
        if not short:
            return parts | shares
        parts |= short
        size -= sum(short.values())
        weights = {name: weight for name, weight in weights.items() if name not in short}
    return parts


def leftover(config: RunConfig, ledger: Ledger, examples: Examples) -> dict[str, int]:
    """What is admitted, in `batch.unit`, of the environments whose examples are used up and whose groups are done."""
    return {
        name: ledger.admitted[name, config.batch.unit]
        for name in filter(examples.used_up, config.environments)
        if not ledger.unfinished[name]
    }


def apportion(size: int, weights: Mapping[str, float], *, turn: int = 0) -> dict[str, int]:
    """Whole numbers by largest remainder; the order of equal remainders rotates with `turn`."""
    total = sum(weights.values())
    exact = {name: size * weight / total for name, weight in weights.items()}
    shares = {name: int(share) for name, share in exact.items()}
    names = sorted(weights)
    in_turn = names[turn % len(names) :] + names[: turn % len(names)]
    by_remainder = sorted(in_turn, key=lambda name: shares[name] - exact[name])
    for name in by_remainder[: size - sum(shares.values())]:
        shares[name] += 1
    return shares


def quantity(config: RunConfig, group: GroupRecord) -> int:
    """What an admitted group adds to a step, in `batch.unit`."""
    if config.batch.unit == "groups":
        return 1
    admitted = group.of(RolloutState.ADMITTED)
    if config.batch.unit == "rollouts":
        return len(admitted)
    return sum([rollout.result.completion_tokens for rollout in admitted if rollout.result])


def in_groups(config: RunConfig, ledger: Ledger, environment: str, amount: float) -> float | None:
    """The number of groups of `environment` that hold `amount` of `batch.unit`; None while their length is unknown.

    For tokens, by the mean of its admitted groups: environments differ in length.
    """
    match config.batch.unit:
        case "groups":
            return amount
        case "rollouts":
            return amount / config.rollouts.group_size
        case "tokens":
            state = ledger.state.environments[environment]
            groups, tokens = state.groups_admitted, state.tokens_admitted
            return amount * groups / tokens if tokens else None if amount else 0

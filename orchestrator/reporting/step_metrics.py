"""The values of one step's line in metrics.jsonl: flat keys, computed from records and counters. Pure functions.

A key whose value is unknown is left out. `docs/metrics.md` lists all keys.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from headpond.batches import EncodedRank, Manifest
from headpond.event_loop.lag_summaries import LagSummary
from headpond.ledger.state_rows import RunState
from headpond.ledger.states import RolloutState
from headpond.orchestrator.ledger.replica_costs import slow_tokens
from headpond.orchestrator.ledger.rows import GroupRecord, RolloutRecord
from headpond.records.rollout import RolloutResult

Values = dict[str, float]

NAMES_MOST = 64  # the most frequent of the environments' own metrics: one name per example would flood the file
LAG_S = ("min", "mean", "median", "p90", "p99", "max")


def of_rollouts(groups: Sequence[GroupRecord], *, policy_version: int) -> Values:
    """Of the step's rollouts."""
    played = [(group.environment, rollout) for group in groups for rollout in group.of(RolloutState.BATCHED)]
    results = [rollout.result for _, rollout in played if rollout.result]
    # A version above the newest is one that the trainer has not published yet, or has gone back from.
    staleness = [max(0, policy_version - result.version_first) for result in results]
    return {
        "rollouts": len(played),
        "groups": len(groups),
        **_lengths(results),
        "truncated_rate": _share(sum(result.truncated for result in results), len(results)),
        "max_tokens_rate": _share(sum(result.hit_max_tokens for result in results), len(results)),
        "policy_error_rate": _share(sum(result.policy_error is not None for result in results), len(results)),
        "masked_rate": _share(sum(rollout.masked for _, rollout in played), len(played)),
        "staleness_mean": _share(sum(staleness), len(staleness)),
        "staleness_max": max(staleness, default=0),
        "version_inexact_rate": _share(
            sum(result.inexact_tokens for result in results), sum(result.completion_tokens for result in results)
        ),
        **_rewards([(environment, r.result.reward) for environment, r in played if r.result]),
        **_named(played),
    }


def policy_failed(groups: Sequence[GroupRecord]) -> str | None:
    """The step's first rollout whose policy failed."""
    rollouts = (rollout for group in groups for rollout in group.of(RolloutState.BATCHED))
    return next((each.id for each in rollouts if each.result and each.result.policy_error is not None), None)


def of_ranks(ranks: Iterable[EncodedRank]) -> Values:
    """Of the step's encoded files."""
    ranks = list(ranks)
    return {
        "tokens": sum(rank.tokens for rank in ranks),
        "loss_tokens": sum(rank.loss_tokens for rank in ranks),
        "samples": sum(rank.samples for rank in ranks),
        "micro_batches": sum(rank.micro_batches for rank in ranks),
        **_entropy(ranks),
    }


def _entropy(ranks: Sequence[EncodedRank]) -> Values:
    """An estimate for the sampling policy: the mean of -logprob over sampled tokens, in nats."""
    sums = [rank.logprob_sum for rank in ranks if rank.logprob_sum is not None]
    loss_tokens = sum(rank.loss_tokens for rank in ranks)
    return {"entropy": -sum(sums) / loss_tokens} if loss_tokens and len(sums) == len(ranks) else {}


def of_manifest(manifest: Manifest) -> Values:
    """For a step whose line was lost with the ledger: what its manifest still has."""
    rollouts, totals = manifest.plan.rollouts, manifest.totals
    return {
        "step": manifest.plan.step,
        "rollouts": totals.rollouts,
        "groups": totals.groups,
        **of_ranks(manifest.ranks),
        **_spread("samples_per_rollout", [len(rollout.sample_lengths) for rollout in rollouts]),
        "masked_rate": _share(sum(rollout.masked for rollout in rollouts), len(rollouts)),
        **_rewards([(rollout.env, rollout.reward) for rollout in rollouts]),
    }


def of_totals(totals: RunState) -> Values:
    """Since the run began."""
    counts = totals.rollout_counts
    return {
        "total/rollouts_planned": totals.rollouts_planned,
        "total/rollouts_generated": totals.rollouts_generated,
        "total/rollouts_delivered": _delivered(totals),
        "total/rollouts_filtered": sum(counts["reasons"].by_name.values()),
        "total/rollouts_dead": counts["states"].by_name[RolloutState.DEAD],
        "total/tokens_generated": totals.tokens_generated,
        "total/fenced": totals.fenced,
    }


def of_window(since: RunState, *, groups: int, longest_s: Mapping[str, float], step_s: float) -> Values:
    """Of everything since the last step, whether or not it is part of this one."""
    reasons, dead = since.rollout_counts["reasons"].by_name, since.rollout_counts["states"].by_name[RolloutState.DEAD]
    decided = _delivered(since) + reasons.total() + dead
    dropped = since.groups_dropped
    return {
        "filtered_rate": _share(reasons.total(), decided),
        **{f"filtered_rate/{reason}": _share(number, decided) for reason, number in reasons.items()},
        **{f"matched_rate/{name}": _share(number, since.rollouts_generated) for name, number in since.matched.items()},
        "dead": dead,
        "fenced": since.fenced,
        "groups_dropped": dropped,
        "replaced_share": _share(dropped, dropped + groups),
        **_solved(since),
        **_played(since),
        **_replicas(since),
        **_timings(since, longest_s),
        "time/step_s": step_s,
        "rollouts_per_s": _share(since.rollouts_generated, step_s),
        "tokens_per_s": _share(since.tokens_generated, step_s),
    }


def of_lag(own: LagSummary, workers: Sequence[LagSummary]) -> Values:
    """The orchestrator's lag since the last step, and the worst of the other processes' last windows."""
    values: Values = {f"event_loop_lag/{name}": getattr(own, f"{name}_s") for name in LAG_S}
    values |= {f"event_loop_lag/{name}": getattr(own, name) for name in ("blocked_s", "window_s", "cpu_share")}
    if not workers:
        return values
    return values | {
        "worker_lag/processes": len(workers),
        "worker_lag/p99": max(lag.p99_s for lag in workers),
        "worker_lag/max": max(lag.max_s for lag in workers),
        "worker_lag/blocked_s": max(lag.blocked_s for lag in workers),
    }


def _delivered(counted: RunState) -> int:
    states = counted.rollout_counts["states"].by_name
    return states[RolloutState.DELIVERED] + states[RolloutState.TRAINED]


def _lengths(results: Sequence[RolloutResult]) -> Values:
    return {
        **_spread("prompt_tokens", [result.prompt_tokens for result in results]),
        **_spread("completion_tokens", [result.completion_tokens for result in results]),
        **_spread("tool_tokens", [result.tool_tokens for result in results]),
        **_spread("turns", [result.turns for result in results]),
        **_spread("samples_per_rollout", [len(result.sample_lengths) for result in results]),
    }


def _rewards(rewards: Sequence[tuple[str, float]]) -> Values:
    if not rewards:
        return {}
    by_environment: dict[str, list[float]] = defaultdict(list)
    for environment, reward in rewards:
        by_environment[environment].append(reward)
    values = [reward for _, reward in rewards]
    mean = sum(values) / len(values)
    return {
        "reward_mean": mean,
        "reward_std": math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)),
        "reward_min": min(values),
        "reward_max": max(values),
        **{f"reward_mean/{name}": sum(part) / len(part) for name, part in sorted(by_environment.items())},
        **{f"rollouts/{name}": len(part) for name, part in sorted(by_environment.items())},
    }


def _named(played: Iterable[tuple[str, RolloutRecord]]) -> Values:
    """Means of the environments' own rewards and metrics, over the rollouts that have them."""
    # Rollouts nearly always have the same names: summing columns is five times faster than single values.
    tables: dict[tuple[str, ...], list[Iterable[float]]] = defaultdict(list)
    for environment, rollout in played:
        if (result := rollout.result) and (result.rewards or result.metrics):
            tables["rewards", environment, *result.rewards].append(result.rewards.values())
            tables["metrics", environment, *result.metrics].append(result.metrics.values())
    sums, numbers = defaultdict[str, float](float), Counter[str]()
    for (folder, environment, *names), rows in tables.items():
        for name, column in zip(names, zip(*rows, strict=True), strict=True):
            sums[f"{folder}/{environment}/{name}"] += sum(column)
            numbers[f"{folder}/{environment}/{name}"] += len(column)
    return {key: sums[key] / number for key, number in sorted(numbers.most_common(NAMES_MOST))}


def _solved(since: RunState) -> Values:
    """Shares of the completed groups, before filters."""
    by_suffix: dict[str, Counter[str]] = defaultdict(Counter)
    for environment, row in since.environments.items():
        for suffix in ("", f"/{environment}") if row.solved else ():
            by_suffix[suffix].update(row.solved)
    shares = {
        f"solved_{solved}{suffix}": parts[solved] / parts.total()
        for suffix, parts in by_suffix.items()
        for solved in ("all", "none", "mixed")
    }
    return shares | {"groups_completed": by_suffix[""].total()}


def _played(since: RunState) -> Values:
    """Rewards of the rollouts of completed groups, before filters."""
    rows = {name: row for name, row in since.environments.items() if row.played}
    if not rows:
        return {}
    played, reward = sum(row.played for row in rows.values()), sum(row.played_reward for row in rows.values())
    return {
        "played_rollouts": played,
        "played_reward_mean": reward / played,
        **{f"played_reward_mean/{name}": row.played_reward / row.played for name, row in rows.items()},
    }


def _replicas(since: RunState) -> Values:
    """What the engine's replicas gave and cost."""
    rows, slow = since.replicas, slow_tokens(since.replicas)
    lost = {url: row.lost_tokens for url, row in rows.items() if row.lost_tokens}
    values: Values = {"replica_lost_tokens": sum(lost.values()), "replica_slow_tokens": sum(slow.values())}
    if len(rows) < 2:
        return values
    return {
        **values,
        **{f"replica_lost_tokens/{url}": number for url, number in lost.items()},
        **{f"replica_slow_tokens/{url}": number for url, number in slow.items() if number},
        **{f"replica_tokens_per_s/{url}": _share(row.tokens, row.seconds) for url, row in rows.items() if row.tokens},
    }


def _timings(since: RunState, longest_s: Mapping[str, float]) -> Values:
    values: Values = {}
    for stage, row in since.stages.items():
        if row.settled:
            values[f"time/{stage}_mean_s"] = row.seconds / row.settled
            values[f"time/{stage}_max_s"] = longest_s.get(stage, 0.0)
    return values


def _spread(name: str, values: Sequence[float]) -> Values:
    if not values:
        return {}
    return {f"{name}/mean": sum(values) / len(values), f"{name}/min": min(values), f"{name}/max": max(values)}


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0

"""The values of one step's line in metrics.jsonl: flat keys, computed from records and counters. Pure functions.

A key whose value is unknown is left out. `docs/metrics.md` lists all keys.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from headpond.batches import EncodedRank, Manifest
from headpond.event_loop.lag_summaries import LagSummary
from headpond.ledger.states import RolloutState
from headpond.orchestrator.ledger.replica_costs import LOST, SECONDS, TOKENS, slow_tokens
from headpond.orchestrator.ledger.rows import GroupRecord, RolloutRecord
from headpond.records.rollout import RolloutResult

Values = dict[str, float]
Counts = Mapping[str, float]  # counter -> its total, or its increase since the last step

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


def of_totals(totals: Counts) -> Values:
    """Since the run began."""
    filtered = sum(value for key, value in totals.items() if key.startswith("filtered:"))
    return {
        "total/rollouts_planned": totals["planned"],
        "total/rollouts_generated": totals["generated"],
        "total/rollouts_delivered": totals["delivered"],
        "total/rollouts_filtered": filtered,
        "total/rollouts_dead": totals["dead"],
        "total/tokens_generated": totals["tokens_generated"],
        "total/fenced": totals["fenced"],
    }


def of_window(since: Counts, *, groups: int, longest_s: Mapping[str, float], step_s: float) -> Values:
    """Of everything since the last step, whether or not it is part of this one."""
    filtered = _under(since, "filtered:")
    decided = since["delivered"] + sum(filtered.values()) + since["dead"]
    dropped = since["groups_dropped"]
    return {
        "filtered_rate": _share(sum(filtered.values()), decided),
        **{f"filtered_rate/{reason}": _share(number, decided) for reason, number in filtered.items()},
        **{f"matched_rate/{name}": _share(n, since["generated"]) for name, n in _under(since, "matched:").items()},
        "dead": since["dead"],
        "fenced": since["fenced"],
        "groups_dropped": dropped,
        "replaced_share": _share(dropped, dropped + groups),
        **_solved(since),
        **_played(since),
        **_replicas(since),
        **_timings(since, longest_s),
        "time/step_s": step_s,
        "rollouts_per_s": _share(since["generated"], step_s),
        "tokens_per_s": _share(since["tokens_generated"], step_s),
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


def _solved(since: Counts) -> Values:
    """Shares of the completed groups, before filters."""
    by_suffix: dict[str, Counter[str]] = defaultdict(Counter)
    for name, number in _under(since, "solved_").items():
        solved, _, environment = name.partition(":")
        for suffix in ("", f"/{environment}"):
            by_suffix[suffix][solved] += int(number)
    shares = {
        f"solved_{solved}{suffix}": parts[solved] / parts.total()
        for suffix, parts in by_suffix.items()
        for solved in ("all", "none", "mixed")
    }
    return shares | {"groups_completed": by_suffix[""].total()}


def _played(since: Counts) -> Values:
    """Rewards of the rollouts of completed groups, before filters."""
    numbers = _under(since, "played:")
    totals = {name: since.get(f"played_reward:{name}", 0.0) for name in numbers}
    if not numbers:
        return {}
    return {
        "played_rollouts": sum(numbers.values()),
        "played_reward_mean": _share(sum(totals.values()), sum(numbers.values())),
        **{f"played_reward_mean/{name}": _share(totals[name], number) for name, number in numbers.items()},
    }


def _replicas(since: Counts) -> Values:
    """What the engine's replicas gave and cost."""
    tokens, seconds, lost = _under(since, TOKENS), _under(since, SECONDS), _under(since, LOST)
    slow = slow_tokens(tokens, seconds)
    values: Values = {"replica_lost_tokens": sum(lost.values()), "replica_slow_tokens": sum(slow.values())}
    if len(tokens.keys() | lost.keys()) < 2:
        return values
    rates = {url: _share(tokens[url], seconds.get(url, 0.0)) for url in tokens}
    return {
        **values,
        **{f"replica_lost_tokens/{url}": number for url, number in lost.items()},
        **{f"replica_slow_tokens/{url}": number for url, number in slow.items() if number},
        **{f"replica_tokens_per_s/{url}": rate for url, rate in rates.items()},
    }


def _timings(since: Counts, longest_s: Mapping[str, float]) -> Values:
    values: Values = {}
    for stage, jobs in _under(since, "settled:").items():
        values[f"time/{stage}_mean_s"] = since.get(f"seconds:{stage}", 0.0) / jobs
        values[f"time/{stage}_max_s"] = longest_s.get(stage, 0.0)
    return values


def _spread(name: str, values: Sequence[float]) -> Values:
    if not values:
        return {}
    return {f"{name}/mean": sum(values) / len(values), f"{name}/min": min(values), f"{name}/max": max(values)}


def _under(counts: Counts, prefix: str) -> Values:
    return {key.removeprefix(prefix): n for key, n in sorted(counts.items()) if n and key.startswith(prefix)}


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0

"""The values of an evaluation, from what is kept of its rollouts' results. Pure functions."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from headpond.orchestrator.ledger.evaluations import EvaluationRecord
from headpond.orchestrator.ledger.rows import SOLVED
from headpond.records.rollout import RolloutResult

NAMES_MOST = 64  # of the environment's own rewards and metrics


def kept(result: RolloutResult) -> dict[str, Any]:
    """What the values need of a result: without files, which are deleted."""
    return {
        "reward": result.reward,
        "rewards": result.rewards,
        "metrics": result.metrics,
        "versions": [result.version_first, result.version_last],
        "completion_tokens": result.completion_tokens,
        "truncated": result.truncated,
        "policy_error": result.policy_error is not None,
    }


def values(record: EvaluationRecord, *, now: float) -> dict[str, float]:
    """Flat, six significant digits. Without rewards if every rollout died."""
    scores = list(record.scores.values())
    found: dict[str, float] = {
        "version": record.version,
        "time": int(now),
        "duration_s": now - record.started_at,
        "examples": record.examples,
        "rollouts": len(scores),
        "dead": record.size - len(scores),
    }
    if scores:
        found |= _of_scores(record, scores)
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in found.items()}


def _of_scores(record: EvaluationRecord, scores: list[dict[str, Any]]) -> dict[str, float]:
    rewards = [score["reward"] for score in scores]
    mean = _mean(rewards)
    by_example: dict[int, list[float]] = defaultdict(list)
    for index, score in record.scores.items():
        by_example[index // record.rollouts].append(score["reward"])
    return {
        "version_first": min(score["versions"][0] for score in scores),
        "version_last": max(score["versions"][1] for score in scores),
        "reward_mean": mean,
        "reward_std": math.hypot(*(reward - mean for reward in rewards)) / math.sqrt(len(rewards)),
        "solved_rate": _mean(reward >= SOLVED for reward in rewards),
        "solved_any_rate": _mean(max(of_example) >= SOLVED for of_example in by_example.values()),
        "completion_tokens": _mean(score["completion_tokens"] for score in scores),
        "truncated_rate": _mean(score["truncated"] for score in scores),
        "policy_error_rate": _mean(score["policy_error"] for score in scores),
        **_named(scores),
    }


def _named(scores: list[dict[str, Any]]) -> dict[str, float]:
    """Means over the rollouts that have them."""
    found: dict[str, list[float]] = defaultdict(list)
    for score in scores:
        for folder in ("rewards", "metrics"):
            for name, value in score[folder].items():
                found[f"{folder}/{name}"].append(value)
    return {name: _mean(found[name]) for name in sorted(found)[:NAMES_MOST]}


def _mean(numbers: Iterable[float]) -> float:
    numbers = list(numbers)
    try:
        return math.fsum(numbers) / len(numbers)
    except OverflowError:  # no float holds the sum
        return math.fsum(number / len(numbers) for number in numbers)

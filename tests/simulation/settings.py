"""The settings of a simulated run, drawn from its seed, and what an operator changes when it is resumed."""

from pathlib import Path
from random import Random
from typing import Any


def drawn_settings(random: Random, directory: Path) -> dict[str, Any]:
    group_size = random.randint(2, 4)
    unit = random.choice(["groups", "groups", "rollouts", "tokens"])
    size = {"groups": random.randint(1, 3), "rollouts": group_size * 2, "tokens": 60}[unit]
    two = random.random() < 0.3
    release_on = random.choice(["checkpointed", "acked"])
    small = release_on == "acked" and random.random() < 0.3
    written_as = random.choice(["native"] * 5 + ["prime-rl"])
    environments = {"sums": {"use": "arithmetic"}} | ({"more": {"use": "arithmetic", "weight": 0.5}} if two else {})
    return {
        "run_dir": directory / "run",
        "ledger_dir": directory / "ledger",
        "steps": random.randint(3, 6),
        "seed": random.randint(0, 99),
        "environments": environments,
        "http": {"port": "off"},
        "max_store_gb": 5e-6 if small else None,
        "lag": {"interval_s": 0.1},
        "rollouts": {
            "group_size": group_size,
            "max_in_flight": random.choice([group_size, 12, 30]),
            "timeout_s": 40.0,
            "group_timeout_s": random.choice([20.0, 200.0, 7200.0]),
            "partial_groups": random.choice(["train", "wait", "drop"]),
            "adapt_in_flight": False,
            "oversample": random.choice([1.0, 1.0, 1.5]),
        },
        "batch": {
            "unit": unit,
            "size": size,
            "order": random.choice(["planned-window", "planned-window", "completion"]),
            "window": random.choice([1.0, 2.0]),
            "data_ranks": random.choice([1, 2]),
            "seq_len": 256,
            "format": written_as,
            "rollouts_jsonl": random.random() < 0.2,
            "max_empty_batches": random.choice([2, 10]),
        },
        "advantages": {"estimator": random.choice(["dr_grpo", "dr_grpo", "grpo", "reinforce_pp_baseline"])},
        "filters": {"stale": {"max_off_policy_steps": random.choice([0, 1, 8])}},
        "trainer": {
            "max_steps_ahead": random.choice([1, 2, "unlimited"]),
            "release_on": release_on,
            "keep_steps": random.choice([0, 1, 2]),
            "keep_jsonl_steps": random.choice([0, 100]),
            "keep_manifests": random.choice(["all", "all", 2]),
        },
        "recovery": {
            "lease_s": random.choice([2.0, 5.0]),
            "max_failures": random.choice([2, 3]),
            "max_losses": random.choice([5, 20]),
            "max_formations": random.choice([1, 3]),
            "stage_timeout_s": 30.0,
            "drain_s": 10.0,
        },
    }


def changed_settings(random: Random) -> dict[str, Any]:
    """Only what may change at a resume."""
    return random.choice(
        [
            {"batch": {"seq_len": random.choice([128, 512])}},
            {"batch": {"normalise": "rollout", "format": "native"}},
            {"batch": {"normalise": "token", "format": "prime-rl"}},
            {"batch": {"window": 3.0, "order": "planned-window"}},
            {"batch": {"rollouts_jsonl": True}},
            {"advantages": {"estimator": random.choice(["rloo", "reinforce_pp_baseline", "dr_grpo"])}},
            {"recovery": {"lease_s": 3.0, "max_failures": 4}},
            {"rollouts": {"max_in_flight": 8, "partial_groups": "train"}},
            {"trainer": {"keep_steps": 0, "keep_manifests": 3}},
            {"filters": {"stale": {"max_off_policy_steps": 2}}},
            {"policy": {"max_turns": 5}},
        ]
    )


def merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    values = dict(settings)
    for key, value in changes.items():
        values[key] = merged(values.get(key, {}), value) if isinstance(value, dict) else value
    return values

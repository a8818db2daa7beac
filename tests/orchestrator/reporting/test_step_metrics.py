from typing import Any

import pytest

from headpond.batches import BatchPlan, BatchRollout, EncodedRank
from headpond.batches.manifest import Manifest, Totals
from headpond.batches.plan import PackingRules
from headpond.event_loop.lag_summaries import LagSummary
from headpond.ledger.state_rows import RunState
from headpond.ledger.states import RolloutState
from headpond.orchestrator.ledger.rows import GroupRecord, RolloutRecord
from headpond.orchestrator.reporting import step_metrics
from headpond.records.rollout import RolloutResult
from headpond.store import BlobRef

BLOB = BlobRef(key="none", size=0, checksum="")


def group(environment: str, *results: dict[str, Any], state: RolloutState = RolloutState.BATCHED) -> GroupRecord:
    made = GroupRecord(id="g1", ordinal=1, environment=environment, example=0)
    made.rollouts = [
        RolloutRecord(group="g1", index=index, state=state, result=RolloutResult(**{"reward": 0.0} | values))
        for index, values in enumerate(results)
    ]
    return made


def lag(process: str, **values: float) -> LagSummary:
    zero = dict.fromkeys(("window_s", "min_s", "mean_s", "median_s", "p90_s", "p99_s", "max_s", "blocked_s"), 0.0)
    return LagSummary(process=process, samples=1, cpu_share=0.5, **zero | values)


def window(since: dict[str, Any], **values: Any) -> dict[str, float]:
    """`since`: the increase of some counters."""
    return step_metrics.of_window(
        RunState.increase(since, {}), **{"groups": 0, "longest_s": {}, "step_s": 2.0} | values
    )


def test_rewards_in_total_and_by_environment() -> None:
    values = step_metrics.of_rollouts(
        [group("sums", {"reward": 1.0}, {"reward": 0.0}), group("guess", {"reward": -2.0})], policy_version=0
    )
    assert (values["rollouts"], values["groups"]) == (3, 2)
    assert values["reward_mean"] == pytest.approx(-1 / 3)
    assert values["reward_std"] == pytest.approx(1.2472, abs=1e-4)
    assert (values["reward_min"], values["reward_max"]) == (-2.0, 1.0)
    assert (values["reward_mean/sums"], values["reward_mean/guess"]) == (0.5, -2.0)
    assert (values["rollouts/sums"], values["rollouts/guess"]) == (2, 1)


def test_only_rollouts_of_the_step_count() -> None:
    part = group("sums", {"reward": 1.0}, {"reward": 9.0})
    part.rollouts[1].state = RolloutState.FILTERED
    values = step_metrics.of_rollouts([part], policy_version=0)
    assert (values["rollouts"], values["reward_mean"]) == (1, 1.0)


def test_lengths_turns_and_samples() -> None:
    short = {"prompt_tokens": 10, "completion_tokens": 2, "turns": 1, "sample_lengths": (12,)}
    long = {"prompt_tokens": 30, "completion_tokens": 6, "turns": 4, "tool_tokens": 8, "sample_lengths": (20, 16, 8)}
    values = step_metrics.of_rollouts([group("sums", short, long)], policy_version=0)
    assert [values[f"prompt_tokens/{of}"] for of in ("mean", "min", "max")] == [20, 10, 30]
    assert [values[f"completion_tokens/{of}"] for of in ("mean", "min", "max")] == [4, 2, 6]
    assert [values[f"tool_tokens/{of}"] for of in ("mean", "min", "max")] == [4, 0, 8]
    assert [values[f"turns/{of}"] for of in ("mean", "min", "max")] == [2.5, 1, 4]
    assert [values[f"samples_per_rollout/{of}"] for of in ("mean", "min", "max")] == [2, 1, 3]


def test_staleness_is_the_distance_to_the_newest_policy() -> None:
    values = step_metrics.of_rollouts(
        [group("sums", {"version_first": 7, "version_last": 8}, {"version_first": 4})], policy_version=8
    )
    assert (values["staleness_mean"], values["staleness_max"]) == (2.5, 4)


def test_rates_of_what_went_wrong_in_the_step() -> None:
    part = group("sums", {"truncated": True}, {"policy_error": "time"}, {}, {})
    part.rollouts[0].masked = True
    values = step_metrics.of_rollouts([part], policy_version=0)
    assert (values["truncated_rate"], values["policy_error_rate"], values["masked_rate"]) == (0.25, 0.25, 0.25)


def test_environment_metrics_are_averaged_over_the_rollouts_that_have_them() -> None:
    first, second = {"metrics": {"tries": 3.0}, "rewards": {"format": 1.0}}, {"metrics": {"tries": 1.0, "rare": 5.0}}
    values = step_metrics.of_rollouts([group("guess", first, second)], policy_version=0)
    assert (values["metrics/guess/tries"], values["metrics/guess/rare"]) == (2.0, 5.0)
    assert values["rewards/guess/format"] == 1.0


def test_a_name_for_every_example_does_not_flood_the_file() -> None:
    results = [{"metrics": {"common": 1.0, f"example_{number}": 1.0}} for number in range(200)]
    values = step_metrics.of_rollouts([group("guess", *results)], policy_version=0)
    named = [key for key in values if key.startswith("metrics/")]
    assert len(named) == step_metrics.NAMES_MOST
    assert "metrics/guess/common" in named


def test_filter_rates_are_shares_of_the_decided_rollouts() -> None:
    states, reasons = {"delivered": 6, "dead": 1}, {"gibberish": 2, "stale": 1, "long_ago": 0}
    run = {"matched": {"repetition": 4}, "rollouts_generated": 8}
    counts = {"states": {"by_name": states}, "reasons": {"by_name": reasons}}
    values = window({"run": {"": run}, "rollout_counts": counts})
    assert values["filtered_rate"] == 0.3
    assert {key: values[key] for key in values if key.startswith("filtered_rate/")} == {
        "filtered_rate/gibberish": 0.2,
        "filtered_rate/stale": 0.1,
    }
    assert values["matched_rate/repetition"] == 0.5
    assert values["dead"] == 1


def test_dropped_groups_are_replaced() -> None:
    values = window({"run": {"": {"groups_dropped": 1}}}, groups=3)
    assert (values["groups_dropped"], values["replaced_share"]) == (1, 0.25)


def test_solve_rates_in_total_and_by_environment() -> None:
    values = window({"environments": {"sums": {"solved": {"all": 1, "mixed": 1}}, "guess": {"solved": {"none": 2}}}})
    assert values["groups_completed"] == 4
    assert [values[f"solved_{how}"] for how in ("all", "none", "mixed")] == [0.25, 0.5, 0.25]
    assert [values[f"solved_{how}/sums"] for how in ("all", "none", "mixed")] == [0.5, 0, 0.5]
    assert [values[f"solved_{how}/guess"] for how in ("all", "none", "mixed")] == [0, 1, 0]


def test_the_reward_of_all_played_groups_stands_beside_that_of_delivered_ones() -> None:
    values = window(
        {"environments": {"sums": {"played": 6, "played_reward": 1.5}, "guess": {"played": 2, "played_reward": -0.5}}}
    )
    assert (values["played_rollouts"], values["played_reward_mean"]) == (8, 0.125)
    assert (values["played_reward_mean/sums"], values["played_reward_mean/guess"]) == (0.25, -0.25)
    assert not [key for key in window({}) if key.startswith("played")]


@pytest.mark.parametrize(
    ("rewards", "solved"),
    [((1, 1), "all"), ((1, 1.5), "all"), ((0, 0), "none"), ((-1, 0), "none"), ((0, 1), "mixed"), ((0.5, 0.5), "mixed")],
)
def test_a_group_is_solved_by_all_none_or_some_rollouts(rewards: tuple[float, float], solved: str) -> None:
    assert group("sums", *({"reward": reward} for reward in rewards)).solved == solved


def test_timings_and_speed() -> None:
    run = {"rollouts_generated": 4, "tokens_generated": 300}
    stages = {"play": {"settled": 4, "seconds": 10.0}, "score": {"longest_s": -3.0}}
    values = window({"run": {"": run}, "stages": stages}, longest_s={"play": 6.0})
    assert {key: value for key, value in values.items() if key.startswith("time/")} == {
        "time/play_mean_s": 2.5,
        "time/play_max_s": 6.0,
        "time/step_s": 2.0,
    }
    assert (values["rollouts_per_s"], values["tokens_per_s"]) == (2.0, 150.0)


def test_lag_of_the_loop_and_the_worst_of_the_workers() -> None:
    own = lag("orchestrator", p99_s=0.01, blocked_s=0.2, window_s=60.0)
    values = step_metrics.of_lag(own, [lag("a", p99_s=0.5, max_s=0.6), lag("b", p99_s=0.1, max_s=0.9)])
    assert (values["event_loop_lag/p99"], values["event_loop_lag/blocked_s"]) == (0.01, 0.2)
    assert {"min", "mean", "median", "p90", "p99", "max", "blocked_s", "window_s", "cpu_share"} == {
        key.removeprefix("event_loop_lag/") for key in values if key.startswith("event_loop_lag/")
    }
    assert (values["worker_lag/processes"], values["worker_lag/p99"], values["worker_lag/max"]) == (2, 0.5, 0.9)
    assert not [key for key in step_metrics.of_lag(own, []) if key.startswith("worker_lag/")]


def test_metrics_of_a_manifest() -> None:
    rollouts = tuple(
        BatchRollout(rollout=f"g1-{index}", group="g1", env="sums", reward=index, advantage=0.0, version_first=0,
                       version_last=0, sample_lengths=(3, 4), columns=BLOB)
        for index in range(2)
    )  # fmt: skip
    plan = BatchPlan(step=5, rules=PackingRules(data_ranks=1, seq_len=64), rollouts=rollouts)
    rank = EncodedRank(plan=plan.digest, data_rank=0, file=BLOB, micro_batches=1, tokens=14, samples=4, loss_tokens=9)
    totals = Totals(loss_tokens=9, samples=4, rollouts=2, groups=1, tokens=14, oversized=0, denominator=9)
    values = step_metrics.of_manifest(Manifest(plan=plan, totals=totals, ranks=(rank,)))
    assert (values["step"], values["rollouts"], values["groups"], values["tokens"], values["loss_tokens"]) == (
        5,
        2,
        1,
        14,
        9,
    )
    assert (values["reward_mean"], values["reward_mean/sums"], values["samples_per_rollout/mean"]) == (0.5, 0.5, 2)


def test_an_empty_step_has_no_means() -> None:
    values = step_metrics.of_rollouts([group("sums")], policy_version=0)
    assert values["rollouts"] == 0
    assert "reward_mean" not in values


def test_what_replicas_cost_since_the_last_step() -> None:
    one = window({"replicas": {"http://a": {"tokens": 100, "seconds": 10.0}}})
    assert (one["replica_lost_tokens"], one["replica_slow_tokens"]) == (0, 0)
    assert not any(key.startswith("replica_tokens_per_s/") for key in one)
    other = {"tokens": 1_000, "seconds": 20.0, "lost_tokens": 70}
    two = window({"replicas": {"http://a": {"tokens": 4_000, "seconds": 40.0}, "http://b": other}})
    assert (two["replica_lost_tokens"], two["replica_lost_tokens/http://b"]) == (70, 70)
    assert (two["replica_slow_tokens"], two["replica_slow_tokens/http://b"]) == (1_000, 1_000)
    assert (two["replica_tokens_per_s/http://a"], two["replica_tokens_per_s/http://b"]) == (100, 50)

"""Examples across kills of the orchestrator: none is skipped, none is played twice in an epoch, and the data ends."""

import signal
from collections.abc import Iterator

import pytest
from support.cluster import Cluster, cluster_in

from headpond.batches.signals import read_status
from headpond.broker import redis_keys
from headpond.data import example_at
from headpond.inspection.run_json import read


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = {"noop": {"examples": 7}, "environments.noop": {"use": "noop", "epochs": 2}}
    with cluster_in(tmp_path_factory.mktemp("cluster"), steps=9, **settings) as cluster:
        cluster.rollout_worker()
        cluster.compute_worker()
        yield cluster


def played(cluster: Cluster) -> list[int]:
    query = "SELECT ordinal, example FROM groups UNION SELECT ordinal, example FROM closed_groups ORDER BY ordinal"
    return [example for _, example in cluster.ledger(query)]


def test_a_killed_run_plays_the_examples_of_its_seed_and_ends_with_them(shared: Cluster) -> None:
    for point in ("planned", "submitted", "replies_read:2", "sealed"):
        crashed = shared.orchestrator(CRASH_AT=point)
        assert crashed.wait() == -signal.SIGKILL, crashed.text[-2000:]
    run = shared.orchestrator()
    result = shared.finish(run)
    assert played(shared) == [example_at(number, size=7, order="shuffled", seed=0, name="noop") for number in range(14)]
    assert result["steps"] == 3
    assert result["filtered"] == {"run_ended": 8}  # two groups that do not fill a step
    assert "action=out_of_data" in run.text
    assert "after 3 of 9 steps: raise environments.NAME.epochs" in run.text
    assert shared.status().phase == "done"


def test_a_run_out_of_data_continues_with_more_epochs_and_tells_its_trainer(shared: Cluster) -> None:
    def trainers_loop_ends() -> bool:
        told = read_status(shared.run_dir)
        return told is not None and told.ended

    assert trainers_loop_ends()
    assert shared.redis.get(redis_keys.ENDED) == read(shared.run_dir)["run"].encode()
    more = {"HEADPOND_ENVIRONMENTS__NOOP__EPOCHS": "4"}
    assert shared.orchestrator(CRASH_AT="planned", **more).wait() == -signal.SIGKILL
    assert not trainers_loop_ends()
    assert not shared.redis.exists(redis_keys.ENDED), "its executions would end"
    again = shared.orchestrator(**more)
    result = shared.finish(again)
    assert sorted(played(shared)[14:21]) == list(range(7))
    assert len(played(shared)) == 28
    assert result["steps"] == 6

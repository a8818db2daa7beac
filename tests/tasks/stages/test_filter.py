"""The fsync of a group's blobs: a full quota is waited for, and blobs that it may have damaged are verified."""

import errno
import os
from pathlib import Path

import pytest
from support.rollouts import MadeTurn, RolloutMaker
from support.stores import run_store

from headpond.config import RunConfig
from headpond.errors import BlobUnwritten
from headpond.records.inputs import GroupInputs
from headpond.records.rollout import RolloutResult
from headpond.tasks import inputs
from headpond.tasks.stage import Call, PlanMessage
from headpond.tasks.stages.filter import filter_group

JOB = PlanMessage(run="r", job="g0000000-filter", attempt=1, sequence=1, timeout_s=60.0, plan="plans/r.g0000000.json")


def test_a_full_quota_at_fsync_is_not_a_failure_and_costs_only_what_it_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig.model_validate({"run_dir": tmp_path, "store": f"file://{tmp_path}/store"})
    store = run_store(config)
    maker = RolloutMaker(store=store, experts="uint8")
    made = [maker.make(f"g0000000-{number}", [[MadeTurn(context=4, completion=40)]]).planned for number in range(3)]
    members = {
        rollout.rollout: RolloutResult(reward=1.0, columns=rollout.columns, experts=rollout.experts) for rollout in made
    }
    group = GroupInputs(group="g0000000", environment="e", example=0, policy_version=0, members=members)
    inputs.write(store, JOB.plan, group)

    def full(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(BlobUnwritten, match="Disk quota exceeded"):
            filter_group(Call(message=JOB, execution="x", config=config))
    assert made[1].experts
    path = store.path(made[1].experts.key)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # a page that the server has not stored
    path.write_bytes(content)
    retried = JOB.model_copy(update={"attempt": 2})
    assert filter_group(Call(message=retried, execution="x", config=config)).dropped == {"g0000000-1": "blob_corrupt"}

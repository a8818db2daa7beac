"""What must hold after a schedule, read from the files, Redis and the processes themselves.

Bias: a rollout's planned length and reward are known by its id, and faults are independent of them. What was delivered
is then a random draw from what was planned, so that the standardised difference of the means is standard normal.
LIMIT_Z is exceeded by chance in 5.7e-7 of the comparisons: with two of them in each of 200 schedules, once in 4,000
such series.
"""

import json
import os
from collections.abc import Iterable, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

from bench.harness.noop.stages import chance
from headpond.batches import Manifest, read_manifests
from headpond.broker import redis_keys
from headpond.broker.queues import Queue
from headpond.ids import GroupId, RolloutId
from headpond.ledger.queries import released_steps
from headpond.ledger.schema import reading
from support.chaos.environments import tokens_of
from support.chaos.world import AgentWorld, EngineWorld, World
from support.pipeline import hashes
from support.processes import alive, children
from support.stores import directory_store
from support.waiting import wait_until

LIMIT_Z = 5.0
RUN_DIR_AT_THE_END = {"audited.json", "lock", "metrics.jsonl", "run.json", "status.json", "trainer"}


def after(world: World) -> dict[str, float]:
    """Check everything. Returns the standardised differences between what was delivered and what was planned."""
    audited = _balanced(world)
    manifests = read_manifests(directory_store(world.cluster.store))
    assert sorted(manifests) == list(range(world.steps)), sorted(manifests)
    in_steps = [rollout.rollout for manifest in manifests.values() for rollout in manifest.plan.rollouts]
    assert len(in_steps) == len(set(in_steps)) == audited["delivered"], "a rollout is in two steps, or in none"
    _nothing_named_is_gone(world, manifests)
    if isinstance(world, EngineWorld):
        _read_alike(world)
    _nothing_left_in_redis(world)
    _no_file_left(world, manifests)
    differences = _differences(world, manifests, planned_groups=audited["planned"] // world.group_size)
    assert all(abs(z) < LIMIT_Z for z in differences.values()), f"biased: {differences}"
    return differences


def _balanced(world: World) -> dict[str, Any]:
    audit = world.cluster.headpond("audit", str(world.cluster.run_dir), "--full", "--json")
    assert audit.exit_code == 0, audit.text
    result = json.loads(audit.text)
    assert result["balanced"], result["problems"]
    assert result["in_flight"] == 0
    assert result["planned"] % world.group_size == 0
    return result


def _nothing_named_is_gone(world: World, manifests: dict[int, Manifest]) -> None:
    """Every file that a manifest names and that is not released is there, with its checksum."""
    store = directory_store(world.cluster.store)
    with reading(world.disk / "ledger" / "ledger.sqlite") as connection:
        released = released_steps(connection)
    for step, manifest in manifests.items():
        kinds = {
            "columns_released": [*(rank.file for rank in manifest.ranks), *(r.columns for r in manifest.plan.rollouts)],
            "experts_released": [rollout.experts for rollout in manifest.plan.rollouts],
        }
        for counter, refs in kinds.items():
            for ref in refs:
                if ref and ref.size and step >= released[counter]:
                    store.open(ref)


def _read_alike(world: EngineWorld) -> None:
    """Every step was trained on, and had the same bytes each time that it was read."""
    seen: dict[int, str] = {}
    for trainer in world.trainers:
        for step, digest in hashes(trainer).items():
            assert seen.setdefault(step, digest) == digest, f"step {step} has changed"
    assert sorted(seen) == list(range(world.steps)), sorted(seen)


def _nothing_left_in_redis(world: World) -> None:
    redis = world.cluster.redis
    assert [queue for queue in Queue if redis.llen(queue)] == []
    wait_until(lambda: not world.cluster.leases(), what="every lease to end")
    keys = {key.decode() for key in redis.scan_iter("headpond:*")}
    endless = [key for key in keys if redis.ttl(key) == -1]
    assert not endless, f"keys without a TTL: {endless}"
    kept = (redis_keys.LEASES, redis_keys.WORKERS, redis_keys.ENDED, "headpond:replies:", "headpond:lag:")
    assert [key for key in keys if not key.startswith(kept)] == []


def _no_file_left(world: World, manifests: dict[int, Manifest]) -> None:
    """Each file of the store is named by a manifest; no temporary file is anywhere."""
    store, named = world.cluster.store, {"run"}
    for manifest in manifests.values():
        refs = [rank.file for rank in manifest.ranks]
        refs += [ref for rollout in manifest.plan.rollouts for ref in (rollout.columns, rollout.experts) if ref]
        named |= {ref.key for ref in refs} | {f"{manifest.plan.directory}/manifest.json"}
    there = {path.relative_to(store).as_posix() for path in store.rglob("*") if path.is_file()}
    if isinstance(world, AgentWorld):
        there = {path for path in there if not path.endswith("/.lock")}
    assert there <= named, f"files that nothing names: {sorted(there - named)[:10]}"
    assert {path.name for path in world.cluster.run_dir.iterdir()} == RUN_DIR_AT_THE_END
    assert not list(world.cluster.run_dir.rglob(".*"))
    assert {path.name for path in (world.disk / "ledger").iterdir()} == {"ledger.sqlite"}


def _differences(world: World, manifests: dict[int, Manifest], planned_groups: int) -> dict[str, float]:
    delivered = [rollout for manifest in manifests.values() for rollout in manifest.plan.rollouts]
    if isinstance(world, EngineWorld):
        groups = sorted({rollout.group for rollout in delivered})
        lengths = [tokens_of(example, world.seed) for example in range(planned_groups)]
        prompts = {sum(rollout.sample_lengths) - lengths[_example(rollout.group)] for rollout in delivered}
        assert len(prompts) == 1, f"completions that are longer or shorter than asked for: {prompts}"
        rewards = [rollout.reward for rollout in delivered]
        return {
            "length": drawn_z([lengths[_example(group)] for group in groups], lengths),
            "reward": (fmean(rewards) - 0.5) * sqrt(12 * len(rewards)),
        }
    planned = [
        str(RolloutId(str(GroupId(ordinal)), index))
        for ordinal in range(1, planned_groups + 1)
        for index in range(world.group_size)
    ]
    mine = [rollout.rollout for rollout in delivered]
    kinds = {"length": "tokens", "reward": "reward"}
    return {
        name: drawn_z([chance(world.seed, id, kind) for id in mine], [chance(world.seed, id, kind) for id in planned])
        for name, kind in kinds.items()
    }


def _example(group: str) -> int:
    """With one environment, in order."""
    return GroupId.parse(group).ordinal - 1


def drawn_z(drawn: Sequence[float], population: Sequence[float]) -> float:
    """The mean of a draw without replacement, in standard errors from the mean of its population."""
    n, size = len(drawn), len(population)
    if n == size:
        return 0.0
    error = sqrt(pvariance(population) / n * (size - n) / (size - 1))
    return (fmean(drawn) - fmean(population)) / error


def no_process_left(before: Iterable[int]) -> None:
    """This process is the reaper of its orphans, so that every descendant is a child sooner or later."""

    def left() -> list[str]:
        for pid in children() - set(before):
            if not alive(pid):
                os.waitpid(pid, os.WNOHANG)
        pids = [pid for pid in children() - set(before) if alive(pid)]
        return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200] for pid in pids]

    wait_until(lambda: not left(), timeout_s=30, what=f"the end of every process: {left()}")

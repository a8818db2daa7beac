"""Schedules of faults over the real orchestrator, on a simulated clock: `make simulate` plays 1,000, `make test` 15."""

from collections import Counter
from pathlib import Path

import pytest

from simulation import invariants, workers
from simulation.bias import Bias
from simulation.playing import SUMMARY, play, replay_command, shrunk
from simulation.workers import reward_of


class Played:
    """Of all schedules of this process."""

    def __init__(self) -> None:
        self.schedules = self.starts = self.stops = 0
        self.faults = Counter[str]()
        self.simulated_s = 0.0
        self.events = Counter[str]()
        self.reasons = Counter[str]()
        self.bias = Bias()

    def __str__(self) -> str:
        rewards, lengths = self.bias.rewards, self.bias.lengths
        rarest = min(self.faults.values(), default=0)
        return (
            f"{self.schedules} schedules, {self.faults.total()} faults of {len(self.faults)} kinds (each at least "
            f"{rarest} times), {self.starts} starts, {self.stops} stops by an error, {self.simulated_s / 3600:.1f} "
            f"simulated hours; delivered against planned, in standard deviations: rewards {rewards.z:+.2f} "
            f"({rewards.schedules} schedules), log lengths {lengths.z:+.2f} ({lengths.schedules})\n"
            f"events: {dict(self.events.most_common())}; filtered: {dict(self.reasons.most_common())}"
        )


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest) -> Played:
    return request.config.stash.setdefault(SUMMARY, Played())


def test_a_schedule_of_faults_loses_nothing(
    tmp_path: Path, simulation_seed: int, only_faults: list[int] | None, played: Played
) -> None:
    world = play(simulation_seed, tmp_path, only_faults)
    if world.violations:
        needed = shrunk(world, tmp_path) if only_faults is None else only_faults
        pytest.fail("\n".join([*world.violations, replay_command(simulation_seed, needed), *world.notes[-60:]]))
    played.schedules += 1
    played.starts += world.starts
    played.stops += len(world.stops)
    played.faults.update(fault.name for fault in world.faults)
    played.simulated_s += world.simulated_s
    played.events.update(world.events)
    played.reasons.update(world.reasons)
    played.bias.add(world)


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_rewards_decide_nothing_about_what_is_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """With every reward replaced by its complement, the same schedule delivers the same rollouts."""
    world = play(seed, tmp_path)
    for module in (workers, invariants):
        monkeypatch.setattr(module, "reward_of", lambda seed, rollout: round(1 - reward_of(seed, rollout), 6))
    again = play(seed, tmp_path)
    assert (again.violations, again.delivered) == ([], world.delivered)
    assert again.notes == world.notes


def test_what_is_delivered_is_distributed_as_planned(played: Played) -> None:
    """Of all schedules above: within four standard deviations of a fair draw."""
    assert abs(played.bias.rewards.z) < 4
    assert abs(played.bias.lengths.z) < 4

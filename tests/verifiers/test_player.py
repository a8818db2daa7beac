"""How the package's settings are checked and applied. These tests import the package themselves."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.session_process import Script
from support.waiting import wait_until

from headpond.environments.verifiers.player import Player
from headpond.environments.verifiers.wire import EpisodeRequest, EpisodeResult, Outcome, Settings
from headpond.errors import ConfigError

CONFIG = {"tricks": ["answers", "raises"]}


@pytest.fixture(autouse=True)
def tricks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


def player_of(*, size: int | None = 2, **config: Any) -> Player:
    return Player(Settings(taskset="tricks", harness=None, size=size, config={"taskset": CONFIG, **config}))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"size": None}, r"the taskset is infinite: set options\.size"),
        ({"interception": {"type": "elastic"}}, r"options\.config\.interception: its type must be `server`"),
        ({"retries": {"max_retries": 1}}, r"options\.config\.retries: remove it"),
        ({"agent": {"retries": {"max_retries": 1}}}, r"options\.config\.agent\.retries: remove it"),
    ],
)
def test_unsupported_settings_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        player_of(**settings)


def test_a_taskset_gets_its_settings_and_runs_on_this_machine() -> None:
    player = player_of(agent={"max_turns": 3})
    assert [task.data.trick for task in player.tasks] == ["answers", "raises"]
    agent = player._environment.config.agent  # pyright: ignore[reportPrivateUsage]
    assert (agent.runtime.type, agent.max_turns) == ("subprocess", 3)


def test_an_episode_with_several_trained_agents_has_no_reward_for_a_rollout(script: Script) -> None:
    """The package's own `best-of-n`, whose attempts are rewarded one by one."""
    result = asyncio.run(played(player_of(id="best-of-n", n=2), script.server.url))
    assert result.outcome is Outcome.ENVIRONMENT
    assert "2 trained traces" in result.reason


WORKER_SCRIPT = f"""
from headpond.environments.verifiers import Verifiers
environment = Verifiers(taskset="tricks", size=1, config={{"taskset": {CONFIG}}})
print(environment._process.pid, flush=True)
input()
"""


def test_the_child_process_ends_with_a_killed_worker() -> None:
    path = f"{Path(__file__).parents[2]}:{Path(__file__).parent}"
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER_SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    with worker:
        assert worker.stdout is not None
        started = Path(f"/proc/{int(worker.stdout.readline())}")
        assert started.exists()
        worker.kill()
    wait_until(lambda: not started.exists(), what="the child process has ended")


async def played(player: Player, url: str) -> EpisodeResult:
    async with player.serving():
        request = EpisodeRequest(number=0, example=0, base_url=f"{url}/v1", api_key="key", model="policy")
        result = await player.play(request)
        interception = player._environment._interception  # pyright: ignore[reportPrivateUsage]
        assert interception.clients == {}, "the rollout's client was kept"
    return result

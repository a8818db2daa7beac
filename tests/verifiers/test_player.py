"""What is refused of the package's settings, and what they become; here the package is imported by the test itself."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.session_process import Script
from support.waiting import wait_until

from penstock.environments.verifiers.player import Player
from penstock.environments.verifiers.wire import Answer, Ask, Kind, Settings
from penstock.errors import ConfigError

NAMES = {"tricks": ["answers", "raises"]}


@pytest.fixture(autouse=True)
def tricks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


def player_of(*, size: int | None = 2, **config: Any) -> Player:
    return Player(Settings(taskset="tricks", harness=None, size=size, config={"taskset": NAMES, **config}))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"size": None}, r"the taskset is endless: set options\.size"),
        ({"interception": {"type": "elastic"}}, r"options\.config\.interception: its type must be `server`"),
        ({"retries": {"max_retries": 1}}, r"options\.config\.retries: leave it out"),
        ({"agent": {"retries": {"max_retries": 1}}}, r"options\.config\.agent\.retries: leave it out"),
    ],
)
def test_settings_that_would_not_do_here_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        player_of(**wrong)


def test_a_taskset_has_its_settings_and_its_own_harness_on_this_machine() -> None:
    player = player_of(agent={"max_turns": 3})
    assert [task.data.trick for task in player.tasks] == ["answers", "raises"]
    agent = player._environment.config.agent  # pyright: ignore[reportPrivateUsage]
    assert (agent.runtime.type, agent.max_turns) == ("subprocess", 3)


def test_an_episode_with_several_trained_agents_has_no_reward_for_a_rollout(script: Script) -> None:
    """The package's own `best-of-n`, whose attempts are rewarded one by one."""
    answer = asyncio.run(played(player_of(id="best-of-n", n=2), script.server.url))
    assert answer.kind is Kind.ENVIRONMENT
    assert "2 trained traces" in answer.why


STARTS_ONE = f"""
from penstock.environments.verifiers import Verifiers
environment = Verifiers(taskset="tricks", size=1, config={{"taskset": {NAMES}}})
print(environment._process.pid, flush=True)
input()
"""


def test_a_killed_worker_takes_its_process_along() -> None:
    path = f"{Path(__file__).parents[2]}:{Path(__file__).parent}"
    worker = subprocess.Popen(
        [sys.executable, "-c", STARTS_ONE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    with worker:
        assert worker.stdout is not None
        started = Path(f"/proc/{int(worker.stdout.readline())}")
        assert started.exists()
        worker.kill()
    wait_until(lambda: not started.exists(), timeout_s=30, what="the environment's process to be gone")


async def played(player: Player, url: str) -> Answer:
    async with player.serving():
        asked = Ask(number=0, example=0, base_url=f"{url}/v1", api_key="key", model="policy")
        answer = await player.play(asked)
        interception = player._environment._interception  # pyright: ignore[reportPrivateUsage]
        assert interception.clients == {}, "nothing is kept of a rollout's client"
    return answer

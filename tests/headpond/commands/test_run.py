"""`headpond run` on a terminal and in a pipe, without workers, so that its jobs stay queued."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.terminal import Terminal
from support.waiting import HANG_S, wait_until

from headpond import config
from headpond.commands.run import summary
from headpond.inspection import status
from headpond.orchestrator import run_dir
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.processes.embedded_redis import EmbeddedRedis
from headpond.records.status import Status

HEADPOND = str(Path(sys.executable).parent / "headpond")
ROOT = str(Path(__file__).parents[3])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def environment(server: EmbeddedRedis, tmp_path: Path) -> dict[str, str]:
    ours = {"HEADPOND_REDIS_URL": server.url, "HEADPOND_RUN_DIR": str(tmp_path / "run"), "HEADPOND_STEPS": "3"}
    ours |= {"HEADPOND_ENVIRONMENTS__NOOP__USE": "noop", "HEADPOND_ENGINE__CHECK": "false"}
    return {name: value for name, value in os.environ.items() if not name.startswith("HEADPOND_")} | ours | {
        "PYTHONPATH": ROOT,
        "HEADPOND_BATCH__SIZE": "4",
        "HEADPOND_ROLLOUTS__GROUP_SIZE": "4",
    }  # fmt: skip


@pytest.fixture(autouse=True)
def surveyed(environment: dict[str, str]) -> None:
    """Store the size of the environment in the ledger; nothing is planned without it."""
    settings = config.load(None, environ=environment)
    run_dir.create_directories(settings)
    run_dir.begin_or_resume(settings)

    async def write() -> None:
        ledger = Ledger(settings.ledger_path)
        ledger.state.environments["noop"].examples = 100
        await ledger.committed()
        ledger.close()

    asyncio.run(write())


def queued(directory: Path) -> bool:
    """Whether the status shows every rollout as submitted."""
    return (directory / "status.json").exists() and status.status(directory).states == {"submitted": 48}


def test_on_a_terminal_the_run_has_a_live_view_and_a_summary(environment: dict[str, str], tmp_path: Path) -> None:
    with Terminal(HEADPOND, "run", env=environment) as terminal:
        queues = "queues      rollouts 48, filtering 0, advantages 0, encoding 0"
        wait_until(lambda: queues in terminal.text, what="the view to show the queues")
        terminal.press("\x03")
        assert terminal.wait() == 0
    text = terminal.text
    assert "steps       0 of 3 delivered" in text
    assert "rollouts    48 planned = 0 delivered + 0 filtered + 48 in flight + 0 dead" in text
    assert "action=draining" in text
    summary = text.rpartition("stopped before its last step after")[2]
    assert "balanced: 48 planned = 0 delivered + 0 filtered + 48 in flight + 0 dead" in summary
    assert "resume      headpond run" in summary
    assert "Traceback" not in text


def test_the_summary_says_how_the_reward_went_and_what_rollouts_died_of() -> None:
    status = Status(run="r", phase="done", running_s=1.0, step=3, steps=3)
    result = {"planned": 8, "delivered": 6, "filtered": {}, "in_flight": 0, "dead": 2, "problems": [], "balanced": True}
    result |= {"steps": 3, "delivered_steps": 3, "manifests_from": 0, "files_from": 0}
    result["dead_jobs"] = [{"kind": "rollout", "jobs": 2, "error": "no such file"}]
    found = [fact[:2] for fact in summary(status, result, "batches", reward="0.22 in step 0, 0.90 in step 2")]
    assert ("dead", "2 rollout jobs: no such file") in found
    assert ("reward", "0.22 in step 0, 0.90 in step 2") in found


def test_in_a_pipe_the_run_writes_plain_lines_and_a_summary(environment: dict[str, str], tmp_path: Path) -> None:
    environment["HEADPOND_RECOVERY__LEASE_S"] = "12"
    process = subprocess.Popen(
        [HEADPOND, "run"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: queued(tmp_path / "run"), what="48 queued rollouts")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0
    assert "WARNING headpond.orchestrator action=draining" in err
    changed = "action=setting_changed recovery.lease_s was 10.0, now 12.0: restart rollouts and compute"
    assert f"WARNING headpond.orchestrator {changed}" in err
    assert [line.partition(" ")[0] for line in out.splitlines()] == ["run", "steps", "verdict", "resume"]
    assert "\x1b" not in out + err


def test_with_json_the_output_is_one_object(environment: dict[str, str], tmp_path: Path) -> None:
    process = subprocess.Popen([HEADPOND, "run", "--steps", "3", "--json"], env=environment,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)  # fmt: skip
    wait_until(lambda: queued(tmp_path / "run"), what="48 queued rollouts")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0
    result = json.loads(out)
    assert result["phase"] in ("draining", "stopping")
    assert result["rollouts"]["in_flight"] == 48
    assert result["audit"]["balanced"]


def test_ctrl_c_while_waiting_for_redis_ends_the_run_at_once(environment: dict[str, str]) -> None:
    environment |= {"HEADPOND_REDIS_URL": "redis://127.0.0.1:1/0", "HEADPOND_RECOVERY__REDIS_PATIENCE_S": "3600"}
    with Terminal(HEADPOND, "run", env=environment) as terminal:
        wait_until(lambda: "action=redis_awaited" in terminal.text, what="a first try")
        terminal.press("\x03")
        assert terminal.wait() == 128 + signal.SIGINT
    assert "Traceback" not in terminal.text

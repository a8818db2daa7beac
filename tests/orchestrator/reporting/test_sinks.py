import asyncio
import os
from pathlib import Path

import pytest
from support.ledgers import configured
from support.waiting import wait_until_async

from orchestrator.reporting.sinks import Sinks


def test_a_sink_whose_package_is_missing_costs_the_run_nothing_and_sees_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "wandb.py").write_text("import os\nraise ImportError(os.environ.get('PENSTOCK_REDIS_URL', 'not here'))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://:hunter2@127.0.0.1:1/0")
    sinks = Sinks(configured(run_dir=str(tmp_path), metrics={"sinks": ["wandb"]}), "0123456789ab")

    async def run() -> None:
        async with sinks.sending():
            await wait_until_async(lambda: bool(sinks.notes))
        assert "steps are not sent to wandb (metrics.sinks needs wandb: pip install wandb (not here))" in sinks.notes[0]

    asyncio.run(run())


def test_the_last_line_is_sent_before_a_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.json").write_text("{}")
    package = """
class SummaryWriter:
    def __init__(self, logdir): self.file = open(logdir + ".txt", "w")
    def add_scalar(self, key, value, step, walltime=None): print(step, key, value, file=self.file)
    def flush(self): self.file.flush()
    def close(self): self.file.close()
"""
    (tmp_path / "tensorboardX.py").write_text(package)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    sinks = Sinks(configured(run_dir=str(tmp_path), metrics={"sinks": ["tensorboard"]}), "0123456789ab")

    async def run() -> None:
        async with sinks.sending():
            await wait_until_async((tmp_path / "tensorboard.txt").exists)
            (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward_mean": 0.5}\n')

    asyncio.run(run())
    assert (tmp_path / "tensorboard.txt").read_text() == "0 reward_mean 0.5\n"


def test_without_sinks_no_process_is_started(tmp_path: Path) -> None:
    async def run() -> None:
        async with Sinks(configured(run_dir=str(tmp_path)), "0123456789ab").sending():
            pass

    asyncio.run(run())

import asyncio
import os
import re
from pathlib import Path

import pytest
from support.ledgers import configured
from support.waiting import HANG_S, wait_until_async

from headpond.sinks import sending
from headpond.sinks.sending import Sinks


def test_a_sink_whose_package_is_missing_costs_the_run_nothing_and_sees_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "wandb.py").write_text("import os\nraise ImportError(os.environ.get('HEADPOND_REDIS_URL', 'not here'))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("HEADPOND_REDIS_URL", "redis://:hunter2@127.0.0.1:1/0")
    sinks = Sinks(configured(run_dir=str(tmp_path), metrics={"sinks": ["wandb"]}), "0123456789ab")

    async def run() -> None:
        async with sinks.sending():
            await wait_until_async(lambda: bool(sinks.notes))
        assert re.search(r"wandb .*metrics\.sinks .*pip install wandb \(not here\)", sinks.notes[0])

    asyncio.run(run())


@pytest.fixture
def tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a stand-in for TensorBoard was given; a value of -1 makes it fail."""
    (tmp_path / "run.json").write_text("{}")
    package = """
class SummaryWriter:
    def __init__(self, logdir): self.file = open(logdir + ".txt", "w")
    def add_scalar(self, key, value, step, walltime=None):
        if value == -1: raise ConnectionError("refused")
        print(step, key, value, file=self.file)
    def flush(self): self.file.flush()
    def close(self): self.file.close()
"""
    (tmp_path / "tensorboardX.py").write_text(package)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sending, "FINISH_S", HANG_S)
    return tmp_path / "tensorboard.txt"


def sinks_of(tensorboard: Path) -> Sinks:
    return Sinks(configured(run_dir=str(tensorboard.parent), metrics={"sinks": ["tensorboard"]}), "0123456789ab")


def test_the_last_line_is_sent_before_a_run_ends(tensorboard: Path) -> None:
    async def run() -> None:
        async with sinks_of(tensorboard).sending():
            await wait_until_async(tensorboard.exists)
            tensorboard.with_name("metrics.jsonl").write_text('{"step": 0, "reward_mean": 0.5}\n')

    asyncio.run(run())
    assert tensorboard.read_text() == "0 reward_mean 0.5\n"


@pytest.mark.parametrize("turns", range(4))
def test_the_last_line_is_sent_if_the_run_ends_while_the_process_starts(tensorboard: Path, turns: int) -> None:
    """The process may have opened its sinks before the loop, on a busy machine, has connected its pipes."""

    async def run() -> None:
        async with sinks_of(tensorboard).sending():
            tensorboard.with_name("metrics.jsonl").write_text('{"step": 0, "reward_mean": 0.5}\n')
            for _ in range(turns):
                await asyncio.sleep(0)

    asyncio.run(run())
    assert tensorboard.read_text() == "0 reward_mean 0.5\n"


def test_a_sink_that_fails_at_the_last_line_is_named_in_the_log(
    tensorboard: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with sinks_of(tensorboard).sending():
            await wait_until_async(tensorboard.exists)
            tensorboard.with_name("metrics.jsonl").write_text('{"step": 0, "reward_mean": -1}\n')

    asyncio.run(run())
    assert "action=sinks_failed sinks=tensorboard error=ConnectionError: refused" in caplog.text


def test_a_process_that_cannot_be_started_is_started_later(
    tensorboard: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sending, "RETRY_S", 0.01)
    sinks = sinks_of(tensorboard)
    command, sinks._command = sinks._command, ["/no/such/python"]

    async def run() -> None:
        async with sinks.sending():
            await wait_until_async(lambda: bool(caplog.records))
            sinks._command = command
            await wait_until_async(tensorboard.exists)

    asyncio.run(run())
    assert "action=sinks_failed sinks=tensorboard error=[Errno 2] No such file or directory" in caplog.text


def test_without_sinks_no_process_is_started(tmp_path: Path) -> None:
    async def run() -> None:
        async with Sinks(configured(run_dir=str(tmp_path)), "0123456789ab").sending():
            pass

    asyncio.run(run())

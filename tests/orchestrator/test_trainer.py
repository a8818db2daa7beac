import asyncio
import errno
from pathlib import Path

import pytest
from support.held_writes import HeldFirst
from support.ledgers import configured

from orchestrator import trainer as trainer_module
from orchestrator.ledger.ledger import Ledger
from orchestrator.trainer import Trainer
from penstock.batches.signals import PublishedPolicy, read_status, write_policy


def test_a_trainer_that_goes_back_to_an_older_version_takes_the_run_with_it(ledger: Ledger, tmp_path: Path) -> None:
    """It resumes from a checkpoint of version 3: what the engine samples from then on is of version 3."""
    trainer = Trainer(configured(run_dir=tmp_path), ledger)
    for version in (7, 3, 4):
        write_policy(tmp_path, PublishedPolicy(version=version, weights=None))
        asyncio.run(trainer.read())
        assert ledger.number("policy_version") == version


@pytest.mark.parametrize(("batch_format", "wait_s", "awaited"), [
    ("prime-rl", 60.0, [False, True, False]),
    ("prime-rl", 0.0, [False, False, False]),
    ("prime-rl-2026-08", 60.0, [False, False, False]),
])  # fmt: skip
def test_a_complete_run_stays_until_prime_rls_trainer_has_broadcast_its_last_version(
    ledger: Ledger, tmp_path: Path, batch_format: str, wait_s: float, awaited: list[bool]
) -> None:
    settings = {"batch": {"format": batch_format}, "trainer": {"last_broadcast_s": wait_s}, "steps": 3}
    trainer = Trainer(configured(run_dir=tmp_path, **settings), ledger)
    ledger.set("steps_delivered", 3)
    seen = list[bool]()
    for version in (1, 2, 3):
        broadcast = tmp_path / "broadcasts" / f"step_{version}"
        broadcast.mkdir(parents=True)
        (broadcast / ("STABLE" if batch_format.endswith("08") else ".finished")).touch()
        asyncio.run(trainer.read())
        assert trainer.state.acked == version - 1
        seen.append(trainer.last_broadcast_awaited)
        assert any("trainer.last_broadcast_s" in trouble for trouble in trainer.troubles) == seen[-1]
    assert seen == awaited


def test_a_disk_that_does_not_give_the_trainers_files_is_reported_and_read_again(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(configured(run_dir=tmp_path), ledger)
    write_policy(tmp_path, PublishedPolicy(version=7, weights=None))
    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "read_trainer", unreadable)
        asyncio.run(trainer.read())
    assert any("the trainer's progress cannot be read" in trouble for trouble in trainer.troubles)
    asyncio.run(trainer.read())
    assert (trainer.troubles, ledger.number("policy_version")) == ([], 7)


def test_the_end_of_a_run_is_not_overwritten_by_a_slow_earlier_status(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer would wait for ever."""
    trainer = Trainer(configured(run_dir=tmp_path), ledger)
    held = HeldFirst(trainer_module.write_status)
    monkeypatch.setattr(trainer_module, "write_status", held)
    ending = trainer.write_status("rollouts are being generated")
    asyncio.run(held.end_with(ending, lambda: trainer.write_status("the run is complete", ended=True)))
    told = read_status(tmp_path)
    assert told is not None
    assert told.ended


def unreadable(run_dir: Path) -> None:
    raise OSError(errno.EIO, "Input/output error", str(run_dir / "trainer" / "policy.json"))

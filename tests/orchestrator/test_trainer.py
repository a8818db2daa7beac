import asyncio
import errno
from pathlib import Path

import pytest
from support.ledgers import configured

from orchestrator import trainer as trainer_module
from orchestrator.ledger.ledger import Ledger
from orchestrator.trainer import Trainer
from penstock.batches.signals import PublishedPolicy, write_policy


def test_a_trainer_that_goes_back_to_an_older_version_takes_the_run_with_it(ledger: Ledger, tmp_path: Path) -> None:
    """It resumes from a checkpoint of version 3: what the engine samples from then on is of version 3."""
    trainer = Trainer(configured(run_dir=tmp_path), ledger)
    for version in (7, 3, 4):
        write_policy(tmp_path, PublishedPolicy(version=version, weights=None))
        asyncio.run(trainer.read())
        assert ledger.number("policy_version") == version


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


def unreadable(run_dir: Path) -> None:
    raise OSError(errno.EIO, "Input/output error", str(run_dir / "trainer" / "policy.json"))

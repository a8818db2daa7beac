import asyncio
from pathlib import Path

from support.ledgers import configured

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

"""Job inputs are in the store before their jobs are submitted, and are written only when needed."""

import asyncio
from itertools import pairwise
from pathlib import Path

from support.ledgers import configured, generated, pipeline_of
from support.stores import directory_store

from headpond.ledger.states import RolloutState
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import JobRecord
from headpond.orchestrator.submission import FORGOTTEN_AT_ONCE, InputFiles
from headpond.records.inputs import GroupInputs
from headpond.tasks import inputs


class Scene:
    """A group to be filtered, and its input file."""

    def __init__(self, ledger: Ledger, directory: Path) -> None:
        config = configured(run_dir=directory)
        self.files = InputFiles(config, "run", ledger, pipeline_of(config, ledger))
        self.ledger = ledger
        self.group = generated(ledger)
        ledger.enter(self.group, "filter")
        self.file = directory / "store" / inputs.key("run", self.group.id)

    def job(self, stage: str) -> JobRecord:
        return self.ledger.add_job(f"{self.group.id}-{stage}", stage, self.group.id)

    def ensure(self, job: JobRecord) -> None:
        assert asyncio.run(self.files.ensure([job]))


def test_the_next_job_of_a_group_reads_the_same_file(ledger: Ledger, tmp_path: Path) -> None:
    scene = Scene(ledger, tmp_path)
    scene.ensure(scene.job("filter"))
    scene.file.write_text("unchanged")
    scene.ensure(scene.job("advantage"))
    assert scene.file.read_text() == "unchanged"


def test_changed_inputs_are_written_again(ledger: Ledger, tmp_path: Path) -> None:
    scene = Scene(ledger, tmp_path)
    scene.ensure(scene.job("filter"))
    before = scene.file.read_text()
    ledger.move(scene.group.rollouts[0], RolloutState.DEAD)
    scene.ensure(scene.job("advantage"))
    assert scene.file.read_text() != before


def test_a_retried_job_gets_its_file_written_again(ledger: Ledger, tmp_path: Path) -> None:
    scene = Scene(ledger, tmp_path)
    job = scene.job("filter")
    scene.ensure(job)
    ledger.submit(job)
    ledger.retry(job, failures=1)
    scene.file.unlink()
    scene.ensure(job)
    assert (
        inputs.read(directory_store(tmp_path / "store"), inputs.key("run", scene.group.id), GroupInputs).group
        == scene.group.id
    )


def test_unneeded_files_are_forgotten_in_slices(ledger: Ledger, tmp_path: Path) -> None:
    """Thousands are left when many groups end at once; freeing their contents takes milliseconds."""
    scene = Scene(ledger, tmp_path)
    unneeded = [f"unneeded-{number}" for number in range(10 * FORGOTTEN_AT_ONCE)]
    scene.files._written |= dict.fromkeys(unneeded)
    left = [len(unneeded)]

    async def count() -> None:
        while left[-1]:
            left.append(sum(key in scene.files._written for key in unneeded))
            await asyncio.sleep(0)

    async def ensure() -> None:
        counting = asyncio.create_task(count())
        assert await scene.files.ensure([scene.job("filter")])
        await counting

    asyncio.run(ensure())
    assert max(before - after for before, after in pairwise(left)) == FORGOTTEN_AT_ONCE
    assert scene.file.exists()

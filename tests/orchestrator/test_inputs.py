"""Job inputs are in the store before their jobs are submitted, and are written only when needed."""

import asyncio
from itertools import pairwise
from pathlib import Path

from support.ledgers import configured, generated
from support.stores import directory_store

from headpond import job_inputs
from headpond.ledger.states import GroupState, JobKind, RolloutState
from headpond.orchestrator.inputs import FORGOTTEN_AT_ONCE, JobInputs
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.records import JobRecord


class Scene:
    """A group to be filtered, and its input file."""

    def __init__(self, ledger: Ledger, directory: Path) -> None:
        self.files = JobInputs(configured(run_dir=directory), "run", ledger)
        self.ledger = ledger
        self.group = generated(ledger)
        ledger.enter(self.group, GroupState.FILTERING)
        self.file = directory / "store" / job_inputs.group_key("run", self.group.id)

    def job(self, kind: JobKind) -> JobRecord:
        return self.ledger.add_job(f"{self.group.id}-{kind}", kind, self.group.id)

    def ensure(self, job: JobRecord) -> None:
        assert asyncio.run(self.files.ensure([job]))


def test_the_next_job_of_a_group_reads_the_same_file(ledger: Ledger, tmp_path: Path) -> None:
    scene = Scene(ledger, tmp_path)
    scene.ensure(scene.job(JobKind.FILTER))
    scene.file.write_text("unchanged")
    scene.ensure(scene.job(JobKind.ADVANTAGE))
    assert scene.file.read_text() == "unchanged"


def test_changed_inputs_are_written_again(ledger: Ledger, tmp_path: Path) -> None:
    scene = Scene(ledger, tmp_path)
    scene.ensure(scene.job(JobKind.FILTER))
    before = scene.file.read_text()
    ledger.move(scene.group.rollouts[0], RolloutState.DEAD)
    scene.ensure(scene.job(JobKind.ADVANTAGE))
    assert scene.file.read_text() != before


def test_a_retried_job_gets_its_file_written_again(ledger: Ledger, tmp_path: Path) -> None:
    scene = Scene(ledger, tmp_path)
    job = scene.job(JobKind.FILTER)
    scene.ensure(job)
    ledger.submit(job)
    ledger.retry(job, failures=1)
    scene.file.unlink()
    scene.ensure(job)
    assert (
        job_inputs.read_group(directory_store(tmp_path / "store"), job_inputs.group_key("run", scene.group.id)).group
        == scene.group.id
    )


def test_unneeded_files_are_forgotten_in_slices(ledger: Ledger, tmp_path: Path) -> None:
    """Thousands are left when many groups end at once; freeing their contents takes milliseconds."""
    scene = Scene(ledger, tmp_path)
    unneeded = [f"unneeded-{number}" for number in range(10 * FORGOTTEN_AT_ONCE)]
    for key in unneeded:
        scene.files.adopt(key)
    left = [len(unneeded)]

    async def count() -> None:
        while left[-1]:
            left.append(sum(key in scene.files._written for key in unneeded))
            await asyncio.sleep(0)

    async def ensure() -> None:
        counting = asyncio.create_task(count())
        assert await scene.files.ensure([scene.job(JobKind.FILTER)])
        await counting

    asyncio.run(ensure())
    assert max(before - after for before, after in pairwise(left)) == FORGOTTEN_AT_ONCE
    assert scene.file.exists()

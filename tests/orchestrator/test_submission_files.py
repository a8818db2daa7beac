"""Job inputs are in the store before their jobs are submitted, until no job reads them."""

import asyncio
from pathlib import Path

from support.ledgers import configured, generated, pipeline_of
from support.stores import directory_store

from headpond.ledger.states import RolloutState
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import JobRecord
from headpond.orchestrator.submission import InputFiles
from headpond.records.inputs import GroupInputs
from headpond.tasks import inputs


class Scene:
    """A group to be filtered, and its input file."""

    def __init__(self, ledger: Ledger, directory: Path) -> None:
        config = configured(run_dir=directory)
        self.pipeline = pipeline_of(config, ledger)
        self.files = InputFiles(config, "run", ledger, self.pipeline)
        self.ledger = ledger
        self.group = generated(ledger)
        ledger.enter(self.group, "filter")
        self.file = directory / "store" / inputs.key("run", self.group.id)

    def job(self, stage: str) -> JobRecord:
        return self.ledger.add_job(f"{self.group.id}-{stage}", stage, self.group.id)

    def ensure(self, job: JobRecord) -> None:
        assert asyncio.run(self.files.ensure([job]))


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


def test_the_file_of_a_group_is_released_when_the_group_ends(ledger: Ledger, tmp_path: Path) -> None:
    scene = Scene(ledger, tmp_path)
    scene.ensure(scene.job("filter"))
    scene.pipeline.drop(scene.group, "a test")
    assert inputs.key("run", scene.group.id) in ledger.unwanted_blobs


def test_a_start_removes_the_files_that_no_job_reads(ledger: Ledger, tmp_path: Path) -> None:
    scene = Scene(ledger, tmp_path)
    scene.ensure(scene.job("filter"))
    left = scene.file.with_name(Path(inputs.key("run", "g0000099")).name)
    other = scene.file.with_name(Path(inputs.key("other", "g0000099")).name)
    for path in (left, other):
        path.write_text("{}")
    asyncio.run(scene.files.remove_unneeded())
    assert (scene.file.exists(), left.exists(), other.exists()) == (True, False, True)

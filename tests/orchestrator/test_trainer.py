import asyncio
import contextlib
import errno
import threading
from pathlib import Path

import pytest
from support.ledgers import configured

from headpond.batches.signals import (
    PublishedPolicy,
    RankProgress,
    RunStatus,
    read_status,
    write_policy,
    write_progress,
    write_status,
)
from headpond.errors import RunError
from headpond.orchestrator import trainer as trainer_module
from headpond.orchestrator.duties.housekeeping import Troubles
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.trainer import Trainer


def test_a_trainer_that_goes_back_to_an_older_version_takes_the_run_with_it(ledger: Ledger, tmp_path: Path) -> None:
    """It resumes from a checkpoint of version 3: what the engine samples from then on is of version 3."""
    trainer = Trainer(configured(run_dir=tmp_path), ledger)
    for version in (7, 3, 4):
        write_policy(tmp_path, PublishedPolicy(version=version, weights=None))
        asyncio.run(trainer.read())
        assert ledger.state.policy_version == version


def test_what_the_trainer_holds_is_said_when_its_files_were_read(ledger: Ledger, tmp_path: Path) -> None:
    trainer = Trainer(configured(run_dir=tmp_path), ledger)
    assert trainer.holds_because is None
    asyncio.run(trainer.read())
    assert str(trainer.holds_because).startswith("the trainer has not acknowledged step 0")


@pytest.mark.parametrize(("delivered", "version", "refused"), [(0, 0, False), (1, 1, True), (1, 20, False)])
def test_the_first_publication_may_be_below_the_start_version_only_before_the_first_step(
    ledger: Ledger, tmp_path: Path, delivered: int, version: int, refused: bool
) -> None:
    trainer = Trainer(configured(run_dir=tmp_path), ledger)
    ledger.state.policy_version = 20
    ledger.state.start_version = 20
    ledger.state.steps_delivered = delivered
    write_policy(tmp_path, PublishedPolicy(version=version, weights=None))
    told = pytest.raises(RunError, match=r"version 1,.* version 20")
    for _ in range(2):  # a run that is started again says the same
        with told if refused else contextlib.nullcontext():
            asyncio.run(trainer.read())
    assert ledger.state.policy_version == (20 if refused else version)


@pytest.mark.parametrize(("batch_format", "wait_s", "awaited"), [
    ("prime-rl", 60.0, [False, True, False]),
    ("prime-rl", 0.0, [False, False, False]),
    ("prime-rl-2026-08", 60.0, [False, False, False]),
])  # fmt: skip
def test_a_complete_run_stays_until_prime_rls_trainer_has_broadcast_its_last_version(
    ledger: Ledger, tmp_path: Path, batch_format: str, wait_s: float, awaited: list[bool]
) -> None:
    settings = {"batch": {"format": batch_format}, "trainer": {"last_broadcast_s": wait_s}, "steps": 5}
    troubles = Troubles()
    trainer = Trainer(configured(run_dir=tmp_path, **settings), ledger, troubles=troubles)
    ledger.state.steps_delivered = 3  # the data is used up
    seen = list[bool]()
    for version in (1, 2, 3):
        broadcast = tmp_path / "broadcasts" / f"step_{version}"
        broadcast.mkdir(parents=True)
        (broadcast / ("STABLE" if batch_format.endswith("08") else ".finished")).touch()
        asyncio.run(trainer.read())
        assert trainer.state.acked == version - 1
        seen.append(trainer.last_broadcast_awaited())
        assert ("trainer.last_broadcast_s" in str(troubles.texts())) == seen[-1]
    assert seen == awaited


@pytest.mark.parametrize(
    ("acked", "said"),
    [
        ({}, "no trainer has acknowledged step 0: start one that reads"),
        ({0: 3, 1: 3}, "the trainer has not acknowledged step 4: it is slow, paused or not running"),
        ({0: 3, 1: 2}, "rank 1 of the trainer has not acknowledged step 3: "),
        ({0: 3}, "rank 1 of the trainer has not acknowledged step 0: "),
    ],
)
def test_a_trainer_that_is_waited_for_is_named_with_the_rank_that_is_behind(
    ledger: Ledger, tmp_path: Path, acked: dict[int, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "AWAITED_S", 0.0)
    troubles = Troubles()
    trainer = Trainer(configured(run_dir=tmp_path), ledger, troubles=troubles)
    ledger.state.steps_delivered = 9
    for rank, step in acked.items():
        write_progress(tmp_path, RankProgress(data_rank=rank, data_ranks=2, epoch=1, resume_step=-1, acked=step))
    asyncio.run(trainer.read())
    assert f"step 8 is sealed, and {said}" in troubles.texts()[0]


def test_a_disk_that_does_not_give_the_trainers_files_is_reported_and_read_again(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    troubles = Troubles()
    trainer = Trainer(configured(run_dir=tmp_path), ledger, troubles=troubles)
    write_policy(tmp_path, PublishedPolicy(version=7, weights=None))
    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "read_trainer", unreadable)
        asyncio.run(trainer.read())
    assert any("read the trainer's progress" in trouble for trouble in troubles.texts())
    asyncio.run(trainer.read())
    assert (troubles.texts(), ledger.state.policy_version) == ([], 7)


def unreadable(run_dir: Path) -> None:
    raise OSError(errno.EIO, "Input/output error", str(run_dir / "trainer" / "policy.json"))


def test_a_status_that_is_being_written_when_the_run_ends_does_not_replace_the_last_one(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(configured(run_dir=tmp_path), ledger)
    begun, slow = threading.Event(), threading.Event()

    def write(run_dir: Path, status: RunStatus) -> None:
        if not status.ended:
            begun.set()
            slow.wait()
        write_status(run_dir, status)

    async def end_while_writing() -> None:
        duty = asyncio.create_task(trainer.write_status("rollouts are being generated"))
        await asyncio.to_thread(begun.wait)
        duty.cancel()
        asyncio.get_running_loop().call_later(0.2, slow.set)  # time for the last status to be first
        with contextlib.suppress(asyncio.CancelledError):
            await duty
        await trainer.write_status("the run is complete", ended=True)

    monkeypatch.setattr(trainer_module, "write_status", write)
    asyncio.run(end_while_writing())
    assert read_status(tmp_path) == RunStatus(why="the run is complete", ended=True)

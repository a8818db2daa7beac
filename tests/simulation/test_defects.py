"""The simulation sees broken code: each test puts one defect into the product, and a schedule must fail."""

import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headpond.orchestrator import release, submission
from headpond.orchestrator.duties.housekeeping import Reported
from headpond.orchestrator.exchange.reply_stream import ReplyStream
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.planning.composer import Composer
from headpond.orchestrator.planning.planner import Planner
from headpond.orchestrator.reconciler import Reconciler, Snapshot
from headpond.tasks.stage import Reply
from simulation.faults import drawn
from simulation.playing import play

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SEEDS = range(100_000, 101_000)
SCHEDULES_MOST = 60
encoded, committed = Composer.encoded, Ledger.committed


async def not_waited_for(ledger: Ledger) -> None:
    ledger.commit_soon()


async def waited_for_by_the_submitter_alone(ledger: Ledger) -> None:
    """So that a kill has to show the rest: what is published too early is seen without one."""
    ledger.commit_soon()
    if sys._getframe(1).f_globals["__name__"] == submission.__name__:
        await committed(ledger)


async def finds_nothing(reconciler: Reconciler, snapshot: Snapshot) -> list[str]:
    return []


async def position_stays(replies: ReplyStream) -> str:
    return await replies._broker.call(replies._last_id)


DEFECTS: dict[str, tuple[Any, str, Any, tuple[str, ...]]] = {
    "the sweep does not know what manifests name": (release, "closed_files", lambda *_: set(), ()),
    "a step with a visible manifest is formed again": (
        Composer, "encoded", lambda self, visible=None: encoded(self), ("orchestrator_disk_does_not_sync",),
    ),
    "dropped groups are counted across starts": (Planner, "resume", lambda self: None, ("everything_is_dropped",)),
    "a message is published before its commit": (Ledger, "committed", not_waited_for, ()),
    "other commits are not waited for": (
        Ledger, "committed", waited_for_by_the_submitter_alone, ("orchestrator_killed_at_commit",),
    ),
    "a reply may name the files of another job": (
        Reply, "names_own_files", property(lambda self: True), ("replies_forged",),
    ),
    "a job without a result is forgotten": (Ledger, "retry", lambda *_, **__: None, ()),
    "an error of housekeeping ends the run": (
        Reported, "__exit__", lambda *_: False, ("orchestrator_disk_fails", "orchestrator_killed"),
    ),
    "a lost job is never found": (Reconciler, "judge", finds_nothing, ("queues_purged",)),
    "a flushed stream is read on from the old position": (
        ReplyStream, "newest", position_stays, ("redis_restarted_empty",),
    ),
}  # fmt: skip


def seeds_with(faults: tuple[str, ...]) -> list[int]:
    """Seeds whose schedules have one of `faults`."""
    schedules = ((seed, {fault.name for fault in drawn(Random(f"{seed}/faults"))}) for seed in SEEDS)
    return [seed for seed, names in schedules if not faults or names & set(faults)][:SCHEDULES_MOST]


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    owner, name, broken, faults = DEFECTS[defect]
    monkeypatch.setattr(owner, name, broken)
    assert any(play(seed, tmp_path).violations for seed in seeds_with(faults))

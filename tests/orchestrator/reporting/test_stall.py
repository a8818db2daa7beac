from pathlib import Path

import pytest
from support.waiting import Clock

from headpond.config import RunConfig
from headpond.errors import RunError
from headpond.orchestrator.duties.housekeeping import Troubles
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.reporting.stall import LOOK_MOST_S, StallWatch
from headpond.orchestrator.trainer import Trainer


def watch(tmp_path: Path, ledger: Ledger, stall_s: float | None = 5.0) -> StallWatch:
    config = RunConfig.model_validate({"run_dir": tmp_path, "recovery": {"stall_s": stall_s}})
    troubles = Troubles()
    troubles.add(lambda: ["the engine cannot be reached"])
    return StallWatch(config, ledger, Trainer(config, ledger), troubles)


def test_no_progress_ends_the_run_with_what_it_waits_for(tmp_path: Path, ledger: Ledger, clock: Clock) -> None:
    stall = watch(tmp_path, ledger)
    for counter in ("groups_admitted", "steps_delivered"):
        for _ in range(4):
            stall.look()
            clock.now += 1.0
        setattr(ledger.state, counter, 1)
        stall.look()
        assert stall.idle_s == 0.0
    for _ in range(4):
        clock.now += 1.0
        stall.look()
    clock.now += 1.0
    with pytest.raises(RunError, match=r"recovery.stall_s\): the engine cannot be reached"):
        stall.look()


def test_a_pause_of_the_process_itself_does_not_count(tmp_path: Path, ledger: Ledger, clock: Clock) -> None:
    stall = watch(tmp_path, ledger)
    stall.look()
    clock.now += 3600.0
    stall.look()
    assert stall.idle_s == LOOK_MOST_S


def test_without_the_setting_a_run_waits(tmp_path: Path, ledger: Ledger, clock: Clock) -> None:
    stall = watch(tmp_path, ledger, stall_s=None)
    for _ in range(10_000):
        clock.now += 1.0
        stall.look()
    assert stall.idle_s > 9_000

"""Trainers in processes of their own, with numpy and xxhash only, while this process seals."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import trainer
from support.rollouts import MadeTurn, RolloutMaker, plan_of, seal
from support.stores import directory_store
from support.waiting import HANG_S, wait_until

from headpond.batches import RunStatus, read_trainer, write_status
from headpond.batches.signals import PublishedPolicy

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start_trainer(*arguments: int) -> "subprocess.Popen[str]":
        command = [sys.executable, trainer.__file__, str(tmp_path), *map(str, arguments)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start_trainer
    for process in started:
        process.kill()
        process.communicate()


def seal_step(run_dir: Path, step: int) -> None:
    store = directory_store(run_dir / "store")
    maker = RolloutMaker(store=store, seed=step, experts="uint16")
    turns = [MadeTurn(context=3, completion=9), MadeTurn(context=2, completion=4)]
    seal(store, plan_of([maker.make(f"s{step}-{n}", [turns]) for n in range(6)], step=step, data_ranks=2))


def lines(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    """Its output as JSON, after it has exited with 0."""
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0
    return [json.loads(line) for line in output.splitlines()]


def test_two_ranks_read_while_another_process_seals(tmp_path: Path, start: Start) -> None:
    ranks = [start(rank, 2, -1) for rank in range(2)]
    for step in range(6):
        seal_step(tmp_path, step)
        # The orchestrator's pacing: at most one sealed step waits.
        wait_until(lambda step=step: read_trainer(tmp_path).acked >= step - 1)
    write_status(tmp_path, RunStatus(why="all steps are done", ended=True, last_step=5))
    printed = [lines(process) for process in ranks]
    assert [[line["step"] for line in rank] for rank in printed] == [list(range(6))] * 2
    assert printed[0] != printed[1], "each rank has its own samples"
    state = read_trainer(tmp_path)
    assert (state.acked, state.checkpointed) == (5, 5)
    assert state.policy == PublishedPolicy(version=6, weights="/weights/5")


def test_a_trainer_killed_while_reading_resumes_20_steps_back(tmp_path: Path, start: Start) -> None:
    for step in range(22):
        seal_step(tmp_path, step)
    write_status(tmp_path, RunStatus(why="all steps are done", ended=True, last_step=21))
    killed = start(0, 2, -1, 21)
    assert killed.stdout
    before = [json.loads(killed.stdout.readline()) for _ in range(22)]
    assert before.pop() == {"hangs": 21}
    killed.kill()
    killed.wait()
    after = lines(start(0, 2, 1))
    assert [line["step"] for line in after] == list(range(2, 22))
    assert after[:-1] == before[2:], "hash for hash"


def test_every_module_but_the_encoders_can_be_imported_in_a_trainers_environment() -> None:
    program = """
import pkgutil, runpy, sys
sys.meta_path.insert(0, runpy.run_path(sys.argv[1])["Refusing"]())
import headpond.batches, headpond.store
for package in (headpond.batches, headpond.store):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if module.name not in ("headpond.batches.writer", "headpond.batches.prime_rl"):
            __import__(module.name)
            print(module.name)
"""
    done = subprocess.run([sys.executable, "-c", program, trainer.__file__], capture_output=True, text=True, check=True)
    assert "headpond.batches.reader" in done.stdout

"""Plays the schedule of a seed, and finds the faults of a failing one that are needed to see it fail."""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from simulation.world import World

MEMORY = Path("/dev/shm")  # syncing a file costs nothing there
REPLAYS_MOST = 12
SUMMARY = pytest.StashKey[Any]()
"""of a session: its text is shown at the end"""


def play(seed: int, directory: Path, only_faults: list[int] | None = None) -> World:
    # The same path at every replay of a process: errors name it.
    base = (MEMORY if MEMORY.is_dir() else directory) / f"headpond-simulation-{os.getpid()}"
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir()
    logging.disable(logging.ERROR)
    try:
        world = World(seed, base)
        if only_faults is not None:
            world.faults = [fault for fault in world.schedule if fault.number in only_faults]
        return world.play()
    finally:
        logging.disable(logging.NOTSET)
        shutil.rmtree(base, ignore_errors=True)


def shrunk(world: World, directory: Path) -> list[int]:
    """Numbers of the faults that a failure needs: each is left out in turn."""
    needed = [fault.number for fault in world.faults]
    for number in list(needed)[:REPLAYS_MOST]:
        fewer = [each for each in needed if each != number]
        if play(world.seed, directory, fewer).violations:
            needed = fewer
    return needed


def replay_command(seed: int, faults: list[int]) -> str:
    numbers = ",".join(map(str, faults)) or "none"
    return f"replay: pytest tests/simulation --simulations 1 --simulation-seed {seed} --simulation-faults {numbers}"

"""Plays one schedule in a process of its own: `python -m support.chaos.play DIRECTORY SEED ROUNDS NUMBER [FAULT ...]`.

`played_in` starts it, in a mount namespace where that is permitted and with `fault_shim.c`. Its last line is a JSON
object; a failed check is a traceback and an exit code. Faults that are named replace those of the schedule.
"""

import ctypes
import json
import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from support.chaos import checks
from support.chaos.draw import Schedule, schedules
from support.chaos.faults import FAULTS, HELD
from support.chaos.world import WORLDS, World
from support.fault_shim import library
from support.processes import children

ROOT = Path(__file__).parents[3]
PR_SET_CHILD_SUBREAPER = 36
HOLD = 0.5
"""Share of faults in HELD that last until the next fault is repaired."""
TIMEOUT_S = 600.0


def play(schedule: Schedule, directory: Path) -> dict[str, Any]:
    """The line of the log, if everything holds."""
    started, chance = time.monotonic(), random.Random(f"{schedule.seed}/{schedule.number}/play")
    world = WORLDS[schedule.world](directory, chance, seed=1000 * schedule.seed + schedule.number)
    try:
        world.begin()
        for held in _play_faults(world, schedule, chance):
            held.close()
        world.progressed()
        world.finish()
        differences = checks.after(world)
    except BaseException:
        if world.mounted:
            shutil.copytree(world.disk, directory / "disk-copy", dirs_exist_ok=True)
        raise
    finally:
        world.close()
    return {
        "faults": world.played,
        "run_seed": world.seed,
        "unseen": world.unseen,
        "exits": world.exits,
        "steps": world.steps,
        "disk": "tmpfs" if world.mounted else "shim",
        "z": {name: round(z, 2) for name, z in differences.items()},
        "seconds": round(time.monotonic() - started, 1),
    }


def _play_faults(world: World, schedule: Schedule, chance: random.Random) -> list[ExitStack]:
    """One fault after another, each when the run has progressed since the last. Returns what is still broken."""
    held: list[ExitStack] = []
    for name in schedule.faults:
        world.progressed()
        world.played.append(name)
        stack = ExitStack()
        stack.enter_context(FAULTS[name](world))
        if name in HELD and not held and chance.random() < HOLD:
            held.append(stack)
            continue
        for each in (stack, *held):
            each.close()
        held = []
    return held


def main(directory: Path, seed: int, rounds: int, number: int, *faults: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    schedule = schedules(seed, rounds)[number]
    if faults:
        schedule = Schedule(number=number, seed=seed, world=schedule.world, faults=faults)
    result = play(schedule, directory)
    from multiprocessing import forkserver, resource_tracker

    servers = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
    checks.no_process_left(servers & children())
    sys.stdout.write(json.dumps(result) + "\n")


def played_in(directory: Path, schedule: Schedule, rounds: int) -> dict[str, Any]:
    """Plays it in another process. Its line of the log: `result` is "held", or the end of its output."""
    command = [sys.executable, "-m", "support.chaos.play", str(directory), str(schedule.seed), str(rounds)]
    command += [str(schedule.number), *schedule.faults]
    namespace = ["unshare", "--mount", "--propagation", "private"]
    permitted = subprocess.run([*namespace, "true"], check=False, capture_output=True).returncode == 0
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HEADPOND_", "PYTEST_"))}
    environment |= {
        "LD_PRELOAD": str(library()),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "CHAOS_NAMESPACE": "1" if permitted else "0",
    }
    started, log = time.monotonic(), directory.with_suffix(".log")
    directory.mkdir()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*(namespace if permitted else []), *command], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    text = log.read_text(errors="replace")
    line: dict[str, Any] = {"number": schedule.number, "seed": schedule.seed, "world": schedule.world}
    if code == 0:
        shutil.rmtree(directory, ignore_errors=True)
        return line | json.loads(text.splitlines()[-1]) | {"result": "held"}
    seconds = round(time.monotonic() - started, 1)
    return line | {"faults": schedule.faults, "seconds": seconds, "result": f"{directory}: {text[-3000:]}"}


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), *sys.argv[5:])

"""The log of many schedules, a JSON line each, and its sum: `python -m support.chaos.log FILE` prints it as JSON."""

import fcntl
import json
import sys
from collections import Counter
from math import sqrt
from pathlib import Path
from typing import Any

from support.chaos.faults import FAULTS

Line = dict[str, Any]
HELD = "held"


def append(log: Path, line: Line) -> None:
    """Schedules are played by several processes."""
    with log.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(line) + "\n")


def read(log: Path) -> dict[tuple[int, int], Line]:
    """(seed, number) -> the newest line of that schedule"""
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return {(line["seed"], line["number"]): line for line in lines}


def summary(log: Path) -> dict[str, Any]:
    lines = list(read(log).values())
    held = [line for line in lines if line["result"] == HELD]
    # Runs of different seeds are independent: the sum over the root of the count is standard normal again.
    seeded = {line["run_seed"]: line["z"] for line in held if "run_seed" in line}
    differences = {name: [z[name] for z in seeded.values()] for name in ("length", "reward")}
    return {
        "schedules": len(lines),
        "held": len(held),
        "failed": [[line["seed"], line["number"], line["result"][-400:]] for line in lines if line["result"] != HELD],
        "seeds": sorted({line["seed"] for line in lines}),
        "worlds": dict(Counter(line["world"] for line in lines)),
        "seconds": round(sum(line["seconds"] for line in lines), 1),
        "faults": {name: sum(name in line["faults"] for line in held) for name in FAULTS},
        "without_visible_effect": dict(Counter(name for line in held for name in set(line["unseen"]))),
        "resumed_after_an_error": Counter(words[-200:] for line in held for words in line["exits"]).most_common(20),
        "steps": sum(line["steps"] for line in held),
        "bias_z": {name: round(sum(zs) / sqrt(len(zs)), 2) for name, zs in differences.items() if zs},
        "largest_z": {name: max(map(abs, zs)) for name, zs in differences.items() if zs},
    }


def table(log: Path) -> list[str]:
    """For a terminal."""
    result = summary(log)
    unseen = result["without_visible_effect"]
    lines = [f"{result['held']} of {result['schedules']} schedules held, {result['steps']} steps ({log})"]
    lines += [f"bias, in standard errors over all schedules: {result['bias_z']}"]
    lines += [f"{'fault':<30} schedules   without visible effect"]
    return lines + [f"{name:<30} {count:>9}   {unseen.get(name, 0):>6}" for name, count in result["faults"].items()]


if __name__ == "__main__":
    json.dump(summary(Path(sys.argv[1])), sys.stdout, indent=2)

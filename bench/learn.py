"""`python -m bench learn`: whether the demo's model learns, and how long that takes.

Runs `headpond demo` with several seeds, one after the other. Rewards are those of the first and the last step; times
include the start and the end of all processes.
"""

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.harness.progress import progress
from bench.harness.report import Report, Target, median
from headpond.config import load
from headpond.errors import RunError
from headpond.processes.child_process import BIN

FIRST_REWARD, LAST_REWARD = 0.3, 0.8
SECONDS = 60.0
ALIGNMENT = 1e-4
LIMIT_S = 900.0
"""Of one demo, on a busy machine."""
TAIL_CHARACTERS = 2_000


@dataclass(frozen=True, kw_only=True)
class Size:
    seeds: int
    options: tuple[str, ...]


# With a number of steps the demo has no time limit: what it takes is measured.
FULL = Size(seeds=5, options=("--steps", str(load(ROOT / "examples" / "demo.toml", environ={}).steps)))
QUICK = Size(seeds=1, options=("--steps", "2", "--rollouts-per-step", "24"))


def run(*, quick: bool) -> Report:
    size = QUICK if quick else FULL
    with progress("learn") as show, tempfile.TemporaryDirectory() as directory:
        demos: list[dict[str, Any]] = []
        for seed in range(size.seeds):
            show(f"demo {seed + 1} of {size.seeds}")
            demos.append(_demo(Path(directory) / str(seed), "--seed", str(seed), *size.options))
    return _report(demos, quick=quick)


def _demo(run_dir: Path, *options: str) -> dict[str, Any]:
    command = [str(BIN / "headpond"), "demo", "--json", "--run-dir", str(run_dir), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise RunError(f"headpond demo ended with exit code {done.returncode}:\n{done.stderr[-TAIL_CHARACTERS:]}")
    return json.loads(done.stdout)


def _report(demos: list[dict[str, Any]], *, quick: bool) -> Report:
    first = [demo["rewards"][0] for demo in demos]
    last = [demo["rewards"][-1] for demo in demos]
    alignments = [demo["alignment"] for demo in demos]
    unaligned = sum(each["tokens"] - each["aligned"] for each in alignments)
    figures = {
        "seeds": float(len(demos)),
        "steps": float(demos[0]["steps"]),
        "rollouts": median([demo["rollouts"]["delivered"] for demo in demos]),
        "reward in the first step": median(first),
        "reward in the last step": median(last),
        "reward in the last step, least": min(last),
        "reward in the last step, most": max(last),
        "duration, s": median([demo["seconds"] for demo in demos]),
        "duration, s, most": max(demo["seconds"] for demo in demos),
        "logprobs computed again": float(sum(each["aligned"] for each in alignments)),
        "trained tokens without an exact version": float(unaligned),
    }
    targets = [
        Target(name="reward in the first step", value=median(first), limit=FIRST_REWARD),
        Target(name="reward in the last step", value=median(last), limit=LAST_REWARD, sense="at least"),
        Target(name="duration, s", value=figures["duration, s"], limit=SECONDS),
        Target(
            name="largest difference of a logprob",
            value=max(each["largest_difference"] for each in alignments),
            limit=ALIGNMENT,
        ),
    ]
    return Report(bench="learn", figures=figures, targets=targets, rounds=len(demos), quick=quick)

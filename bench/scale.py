"""`python -m bench scale`: CPU time of each step of the orchestrator's loop at size, and its memory over many steps.

No-op rollouts in groups of 8 pass real workers into a real ledger; a trainer acknowledges every step. The orchestrator
runs on a loop that times its steps and garbage collections (`harness/step_timer.py`), except where memory is measured.
"""

import asyncio
import json
import os
import subprocess
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.cluster import NOOPS, Cluster, Run, start_cluster
from bench.harness.ledger_maker import make_ledger
from bench.harness.procfs import cpu_s, resident_mb
from bench.harness.progress import Show, progress
from bench.harness.report import Report, Target, median
from bench.harness.step_timer import FILE
from headpond import ids
from headpond.batches.signals import (
    Checkpoint,
    PublishedPolicy,
    RankProgress,
    write_checkpoint,
    write_policy,
    write_progress,
)
from headpond.config import RunConfig
from headpond.errors import RunError
from headpond.inspection import run_json
from headpond.inspection.audit import audit
from headpond.inspection.status import status
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.release import Sweeper
from headpond.processes.child_process import program
from headpond.records.status import Status

ROUNDS = 3
GROUP_SIZE = 8
RUN_S, END_S = 900.0, 120.0  # time-outs; about 60 s and 5 s are usual
COMPUTE_PROCESSES = 2
VERSIONS = 4  # that the trainer publishes: no-op rollouts are of version 0, and stale after 8
TIMED = ("python", "-m", "bench.harness.timed_orchestrator")
NAMES_SHOWN = 4
STOP_MS = 20.0  # for the garbage collector; 145 ms by Python's own rule
HALVES = 1.5  # CPU of a group in the second half of planning / in the first
MADE_STEP = 2_048  # rollouts a step in the made ledger
SWEPT_GROUPS = 16  # that have left files
GROWTH_KB = 2.0
"""per step; less than a rollout's record with its result"""


@dataclass(frozen=True, kw_only=True)
class Size:
    steps: dict[int, int]
    """rollouts a step -> number of steps"""
    in_flight: int
    """rollouts that run at the same time"""
    held_s: float
    """how long each of them runs: until all have begun, and some polls more"""
    open_groups: int
    many_steps: int
    """of one group each"""
    limits_ms: dict[int, float]
    """rollouts a step -> the longest step of the loop"""
    closed: int
    """rollouts in a made ledger"""
    starts: int
    """orchestrators that are started on it, and on no ledger"""


FULL = Size(
    steps={256: 8, 2_048: 4, 8_192: 3}, in_flight=20_000, held_s=60.0, open_groups=20_000, many_steps=2_000,
    limits_ms={256: 10.0, 2_048: 10.0, 8_192: 20.0}, closed=20_000_000, starts=3,
)  # fmt: skip
QUICK = Size(
    steps={16: 2, 32: 2},
    in_flight=64,
    held_s=1.0,
    open_groups=24,
    many_steps=8,
    limits_ms={16: 10.0, 32: 10.0},
    closed=20_000,
    starts=1,
)


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Of one run of the orchestrator."""

    steps_ms: list[float]
    """CPU time of each step of its loop"""
    stops_ms: list[float]
    """CPU time of each garbage collection"""
    longest_ms: dict[str, float]
    """steps over 1 ms, by their coroutines -> the longest"""

    @property
    def worst_ms(self) -> float:
        return max(self.steps_ms)

    def worst_of(self, coroutine: str) -> float:
        return max((value for name, value in self.longest_ms.items() if name.startswith(coroutine)), default=0.0)


def run(*, quick: bool) -> Report:
    size, rounds = (QUICK, 1) if quick else (FULL, ROUNDS)
    figures: dict[str, float] = {}
    targets: list[Target] = []
    with progress("scale") as show:
        for measure in (_measure_steps, _measure_in_flight, _measure_open_groups, _measure_memory, _measure_ledger):
            measured, limits = measure(size, rounds, show)
            figures |= measured
            targets += limits
    return Report(bench="scale", figures=figures, targets=targets, rounds=rounds, quick=quick)


Measured = tuple[dict[str, float], list[Target]]


def _measure_steps(size: Size, rounds: int, show: Show) -> Measured:
    played: dict[int, list[Timings]] = {rollouts: [] for rollouts in size.steps}
    with start_cluster(**NOOPS, rollouts__group_size=GROUP_SIZE) as cluster:
        cluster.rollout_worker(concurrency=1_024)
        cluster.compute_worker(concurrency=COMPUTE_PROCESSES)
        cluster.wait_ready()
        for number in range(1, rounds + 1):
            for rollouts, steps in size.steps.items():
                here = f"round {number} of {rounds}, steps of {rollouts}"
                settings = {"steps": steps, "batch__size": rollouts // GROUP_SIZE}
                run = cluster.orchestrator(program=TIMED, rollouts__max_in_flight=2 * rollouts, **settings)
                _play(run, lambda text, here=here: show(f"{here}: {text}"))
                if audit(run.directory)["delivered"] != steps * rollouts:
                    raise RunError(f"the run failed: {audit(run.directory)}")
                played[rollouts].append(_timings(cluster))
    figures: dict[str, float] = {}
    for rollouts, timings in played.items():
        figures |= _figures(f"steps of {rollouts}", timings)
    return figures, [
        Target(name=_longest(f"steps of {n}"), value=figures[_longest(f"steps of {n}")], limit=size.limits_ms[n])
        for n in size.steps
    ]


def _measure_in_flight(size: Size, _: int, show: Show) -> Measured:
    """All rollouts run at the same time, and are reconciled with their leases once a second."""
    name = f"{size.in_flight} in flight"
    step_groups = size.in_flight // GROUP_SIZE // 8
    settings = {"rollouts__group_size": GROUP_SIZE, "rollouts__max_in_flight": size.in_flight}
    most = 0

    def look(status: Status) -> None:
        nonlocal most
        most = max(most, sum(status.running_by_worker.values()))

    with start_cluster(**NOOPS, **settings, steps=9, batch__size=step_groups) as cluster:
        cluster.rollout_worker(concurrency=size.in_flight, noop_rollout_s=size.held_s)
        cluster.compute_worker(concurrency=COMPUTE_PROCESSES)
        cluster.wait_ready()
        _play(cluster.orchestrator(program=TIMED), lambda text: show(f"{name}: {text}"), look)
        timings = _timings(cluster)
    figures = {
        f"{name}: running at once, most": float(most),
        **_figures(name, [timings]),
        f"{name}: longest slice of reconciling, CPU ms": timings.worst_of("Orchestrator.reconcile"),
    }
    return figures, [
        Target(name=_longest(name), value=timings.worst_ms, limit=10.0),
        Target(name=_stop(name), value=figures[_stop(name)], limit=STOP_MS),
    ]


def _measure_open_groups(size: Size, _: int, show: Show) -> Measured:
    """The rollouts of all groups are queued; then the run is stopped, which withdraws them."""
    name, rollouts = f"{size.open_groups} open groups", size.open_groups * GROUP_SIZE
    settings = {"rollouts__group_size": GROUP_SIZE, "rollouts__max_in_flight": rollouts}
    with start_cluster(**NOOPS, **settings, steps=64, batch__size=-(-size.open_groups // 16)) as cluster:
        hold = cluster.directory / "hold"
        hold.touch()
        cluster.rollout_worker(concurrency=16, noop_hold_while=hold)
        cluster.wait_ready()
        run = cluster.orchestrator(program=TIMED)
        at_s = [
            _cpu_s_when_planned(run, share * rollouts, lambda text: show(f"{name}: {text}"))
            for share in (0.0, 0.5, 1.0)
        ]
        memory_mb = resident_mb(run.process.pid)
        _let_it_poll(run)
        hold.unlink()
        run.process.terminate()
        run.process.wait_until(lambda: run.process.ended, what="it has ended", timeout_s=END_S)
        timings = _timings(cluster)
    first, second = (1000 * (after - before) / (size.open_groups / 2) for before, after in pairwise(at_s))
    figures = {
        f"{name}: orchestrator's CPU of a group, first half, ms": first,
        f"{name}: orchestrator's CPU of a group, second half, ms": second,
        f"{name}: orchestrator's memory, MB": memory_mb,
        **_figures(name, [timings]),
    }
    return figures, [
        Target(name=_longest(name), value=timings.worst_ms, limit=10.0),
        Target(name=_stop(name), value=figures[_stop(name)], limit=STOP_MS),
        Target(name=f"{name}: CPU of a group, second half / first", value=second / first, limit=HALVES),
    ]


def _measure_memory(size: Size, _: int, show: Show) -> Measured:
    """After a quarter of the steps, in which caches fill and memory is touched for the first time, and before the end,
    when `headpond run` audits."""
    memory: list[tuple[int, float]] = []
    with start_cluster(**NOOPS, rollouts__group_size=GROUP_SIZE, steps=size.many_steps, batch__size=1) as cluster:
        cluster.rollout_worker(concurrency=64)
        cluster.compute_worker(concurrency=COMPUTE_PROCESSES)
        cluster.wait_ready()
        run = cluster.orchestrator(rollouts__max_in_flight=16 * GROUP_SIZE)
        _play(
            run,
            lambda text: show(f"memory: {text}"),
            lambda s: memory.append((s["step"], resident_mb(run.process.pid))),
        )
    between = [each for each in memory if size.many_steps // 4 <= each[0] < size.many_steps]
    steps, megabytes = np.array(between or memory[-1:]).T
    later = len(steps) // 2
    grown_mb, passed = (float(each[later:].mean() - each[: later or 1].mean()) for each in (megabytes, steps))
    growth_kb = 1000 * grown_mb / max(1.0, passed)
    name = f"{size.many_steps} steps: kB more a step"
    figures = {
        f"{size.many_steps} steps: memory after a quarter, MB": float(megabytes[0]),
        f"{size.many_steps} steps: memory at the end, MB": float(megabytes[-1]),
        name: growth_kb,
    }
    return figures, [Target(name=name, value=growth_kb, limit=GROWTH_KB)]


def _measure_ledger(size: Size, _: int, show: Show) -> Measured:
    """Start, status and sweep of a run with a ledger of many closed rollouts, which is made and not played."""
    name = f"ledger of {size.closed} rollouts"
    settings = {"rollouts__group_size": GROUP_SIZE, "rollouts__max_in_flight": GROUP_SIZE, "steps": size.closed}
    with start_cluster(**NOOPS, **settings) as cluster:  # more steps than the ledger has, so that the run continues
        show(f"{name}: making it")
        made, empty = cluster.directory / "made", cluster.directory / "empty"
        made.mkdir()
        make_ledger(made / "ledger.sqlite", size.closed, group_size=GROUP_SIZE, step_rollouts=MADE_STEP)
        os.sync()  # the file's pages are not written to disk while starts are timed
        stored = (made / "ledger.sqlite").stat().st_size / size.closed
        starts: dict[Path, list[float]] = {made: [], empty: []}
        status_s: list[float] = []
        for number in range(1, size.starts + 1):
            for directory, seconds in starts.items():
                show(f"{name}: start {number} of {size.starts}")
                seconds.append(_start_s(cluster, directory))
            status_s.append(_status_s(made))
        steps = status(made).step
        sweep_s, swept = _sweep_s(made, steps)
    start_s, empty_s = (median(seconds) for seconds in starts.values())
    figures = {
        f"{name}: delivered steps": float(steps),
        f"{name}: bytes a rollout": stored,
        f"{name}: start, s": start_s,
        f"{name}: start without a ledger, s": empty_s,
        f"{name}: headpond status, s": median(status_s),
        f"{name}: sweep, s": sweep_s,
        f"{name}: files swept": float(swept),
    }
    return figures, [
        Target(name=f"{name}: bytes a rollout", value=stored, limit=200.0),
        Target(name=f"{name}: start, s more than without", value=start_s - empty_s, limit=2.0),
        Target(name=f"{name}: headpond status, s", value=median(status_s), limit=0.5),
        Target(name=f"{name}: sweep, s", value=sweep_s, limit=1.0),
    ]


def _start_s(cluster: Cluster, directory: Path) -> float:
    """From the start of the process until it begins to plan; then it is stopped."""
    (directory / "status.json").unlink(missing_ok=True)
    began = time.monotonic()
    process = cluster.start("orchestrator", "headpond", "run", run_dir=directory, store=(directory / "store").as_uri())
    process.wait_until((directory / "status.json").exists, what="it begins to plan", timeout_s=END_S)
    started_s = time.monotonic() - began
    process.terminate()  # not killed: the next one would wait until the lock of this one expires
    process.wait_until(lambda: process.ended, what="it has ended", timeout_s=END_S)
    return started_s


def _status_s(directory: Path) -> float:
    """The command as a user sees it, with the start of Python."""
    began = time.monotonic()
    subprocess.run([program("headpond"), "status", str(directory)], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def _sweep_s(directory: Path, step: int) -> tuple[float, int]:
    """A sweep that finds files of closed groups, none of which the ledger names."""
    run = run_json.read(directory)["run"]
    config = RunConfig(run_dir=directory, store=(directory / "store").as_uri())
    middle = step * MADE_STEP // GROUP_SIZE // 2
    for ordinal in range(middle, middle + SWEPT_GROUPS):
        for number in range(GROUP_SIZE):
            rollout = ids.rollout_directory(run, str(ids.RolloutId(str(ids.GroupId(ordinal)), number)))
            execution = directory / "store" / rollout / f"1.{ids.new_execution()}"
            execution.mkdir(parents=True)
            (execution / "columns").touch()
    ledger = Ledger(config.ledger_path)
    try:
        began = time.monotonic()
        swept = asyncio.run(Sweeper(config, run, ledger).run_once())
        return time.monotonic() - began, swept
    finally:
        ledger.close()


# the figures of a run


def _longest(case: str) -> str:
    return f"{case}: longest step of the loop, CPU ms"


def _stop(case: str) -> str:
    return f"{case}: longest stop for the collector, CPU ms"


def _figures(case: str, rounds: list[Timings]) -> dict[str, float]:
    """Medians over rounds, and the longest steps by their coroutines."""
    by_name: dict[str, float] = {}
    for name, value in (pair for timings in rounds for pair in timings.longest_ms.items()):
        by_name[name] = max(value, by_name.get(name, 0.0))
    worst = sorted(by_name.items(), key=lambda pair: -pair[1])[:NAMES_SHOWN]
    return {
        f"{case}: steps of the loop": median([float(len(timings.steps_ms)) for timings in rounds]),
        _longest(case): median([timings.worst_ms for timings in rounds]),
        f"{case}: p99.9 of a step, CPU ms": median([float(np.quantile(t.steps_ms, 0.999)) for t in rounds]),
        **{f"{case}: {name}, most, CPU ms": value for name, value in worst},
        _stop(case): median([max(timings.stops_ms, default=0.0) for timings in rounds]),
    }


def _timings(cluster: Cluster) -> Timings:
    """Of the orchestrator that ended last."""
    written: dict[str, Any] = json.loads((cluster.directory / FILE).read_text())
    return Timings(
        steps_ms=[1000 * each for each in written["cpu_s"]],
        stops_ms=[1000 * each for each in written["collections_s"]],
        longest_ms={name: 1000 * value for name, value in written["longest_s"].items()},
    )


# playing a run


def _play(run: Run, show: Show, look: Any = lambda status: None) -> None:
    """Train on every step until the run has ended; `look` is called with every status that is read."""
    acked = -1

    def ended() -> bool:
        nonlocal acked
        status = run.status()
        look(status)
        show(f"{status.step} of {status.steps} steps, {status.rollouts['in_flight']} rollouts in flight")
        if status.step - 1 > acked:
            acked = status.step - 1
            _acknowledge(run, acked)
        return run.process.ended

    run.process.wait_until(ended, what="the run has ended", timeout_s=RUN_S)
    if run.process.exit_code != 0:
        raise RunError(f"the run failed:\n{run.process.output_tail}")


def _acknowledge(run: Run, step: int) -> None:
    write_progress(run.directory, RankProgress(data_rank=0, data_ranks=1, epoch=1, resume_step=0, acked=step))
    write_checkpoint(run.directory, Checkpoint(step=step))
    write_policy(run.directory, PublishedPolicy(version=min(step + 1, VERSIONS), weights=None))


def _cpu_s_when_planned(run: Run, rollouts: float, show: Show) -> float:
    """CPU time of the orchestrator when so many rollouts are planned and queued."""

    def planned() -> bool:
        status = run.status()
        show(f"{status.rollouts['planned']} rollouts planned")
        return status.rollouts["planned"] >= rollouts and not status.waiting_jobs["rollouts"]

    run.process.wait_until(planned, what="every rollout is queued", timeout_s=RUN_S)
    return cpu_s(run.process.pid)


def _let_it_poll(run: Run, times: int = 4) -> None:
    """Wait until the leases and all open jobs have been compared some times: each status is a second younger."""
    began = run.status().at or 0.0
    run.process.wait_until(lambda: (run.status().at or 0.0) > began + times, what="it has reported", timeout_s=END_S)

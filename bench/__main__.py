"""`python -m bench NAME`: runs one benchmark and prints its figures and targets."""

import importlib
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Protocol, cast

import typer

from bench import ROOT
from bench.harness.report import Report
from bench.harness.target_bars import target_bars
from headpond.commands.output import Json, print_json


class Bench(StrEnum):
    """Modules of `bench/`, each with `run(quick: bool) -> Report`; hyphens stand for underscores."""

    CONTROL = "control"
    RECOVERY = "recovery"
    INGEST = "ingest"
    FILTERS = "filters"
    SESSIONS = "sessions"
    ROLLOUT_WORKER = "rollout-worker"
    RENDERERS = "renderers"
    LAG = "lag"
    BOUNDARY = "boundary"
    STEPS = "steps"
    TURN = "turn"
    SCALE = "scale"
    SOAK = "soak"
    ENGINE = "engine"
    ENGINE_REAL = "engine-real"
    POOL = "pool"
    DASHBOARD = "dashboard"
    LEARN = "learn"


class BenchModule(Protocol):
    def run(self, *, quick: bool) -> Report: ...


def bench(
    name: Bench,
    as_json: Json = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if a target is missed.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Smoke run: numbers are not meaningful.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw the targets and their limits.")] = None,
) -> None:
    """Run one benchmark of Headpond against its baseline.

    \b
    control         CPU time and throughput of the pipeline itself
    recovery        time until the rollouts of a killed worker run elsewhere
    ingest          time and memory from response bodies to arrays
    filters         time of the filters over a step
    sessions        throughput, latency and memory of the session server
    rollout-worker  lag and memory of a rollout worker
    renderers       lag while a tokenizer is built, memory of adapters
    lag             lag and memory of the orchestrator
    boundary        time from the last admitted rollout to the sealed step
    steps           CPU time of each step of a rollout worker's event loop
    turn            where the CPU time of a turn goes in a rollout worker
    scale           CPU time of each step of the orchestrator's loop, with large steps and much open work
    soak            leaks of a worker over 20,000 rollouts
    engine          responses per second of the simulated engine
    engine-real     turns per second of a real vLLM, through Headpond and directly
    pool            CPU time of a task on the asyncio pool
    dashboard       server time, memory and first paint with 1,000,000 rollouts
    learn           reward of the demo's model, time and alignment, with five seeds
    """
    module = cast("BenchModule", importlib.import_module(f"bench.{name.value.replace('-', '_')}"))
    report = module.run(quick=quick)
    if as_json:
        print_json(report.as_dict())
    else:
        print_report(report)
    if plot:
        plot.write_text(target_bars(report))
    if strict and not report.met:
        raise typer.Exit(1)


def print_report(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    load = ", ".join(f"{value:.1f}" for value in report.load)
    title = f"{report.bench}: {report.rounds} rounds, load {load}" + (
        " (smoke run: numbers are not meaningful)" * report.quick
    )
    table = Table("figure", "value", title=title, title_justify="left")
    for name, value in report.figures.items():
        table.add_row(name, f"{value:,.4g}")
    targets = Table("target", "value", "limit", "met")
    for target in report.targets:
        targets.add_row(
            target.name, f"{target.value:,.4g}", f"{target.sense} {target.limit:,.4g}", "yes" if target.met else "NO"
        )
    console = Console()
    console.print(table)
    console.print(targets)


if __name__ == "__main__":
    # The processes that a benchmark starts import `bench` too, for its environments and its workers.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(bench)
    app()

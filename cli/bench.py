"""`penstock bench NAME`: a table for people, `--json` for scripts, `--strict` for gates."""

import importlib
from enum import StrEnum
from typing import Annotated, Protocol, cast

import typer

from bench.harness.report import Report
from cli.output import Json, print_json


class Bench(StrEnum):
    """The modules of `bench/` that have a `run(quick: bool) -> Report`, with hyphens for underscores."""

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
    SOAK = "soak"
    ENGINE = "engine"
    POOL = "pool"


class BenchModule(Protocol):
    def run(self, *, quick: bool) -> Report: ...


def bench(
    name: Bench,
    as_json: Json = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 when a target is missed.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A sanity run: no figure of it means anything.")] = False,
) -> None:
    """Measure one part of Penstock beside its baseline."""
    module = cast("BenchModule", importlib.import_module(f"bench.{name.value.replace('-', '_')}"))
    report = module.run(quick=quick)
    if as_json:
        print_json(report.as_dict())
    else:
        show(report)
    if strict and not report.met:
        raise typer.Exit(1)


def show(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    load = ", ".join(f"{value:.1f}" for value in report.load)
    title = f"{report.bench}: {report.rounds} rounds, load {load}" + (" (quick: not a measurement)" * report.quick)
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

"""`penstock audit RUN_DIR`: does it add up."""

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from cli import facts
from cli.facts import Fact
from cli.output import Json, print_facts, print_json
from cli.status import RunDir

if TYPE_CHECKING:
    from orchestrator.ledger.audit import Progress


def audit(run_dir: RunDir, as_json: Json = False) -> None:
    """Account for every rollout of a run: does it add up?

    Every planned rollout is delivered in exactly one step, filtered for a reason, in flight, or dead with its error.
    The ledger is held against itself and against the manifests, and every file that they name and that is not yet
    released is read again and its checksum compared. Nothing is changed, and the run may go on.
    The exit code is 1 when it does not add up.
    """
    from orchestrator.ledger.audit import audit as account

    with reading_again() as progress:
        found = account(run_dir, progress)
    if as_json:
        print_json(found)
    else:
        print_facts(_facts(found))
    if not found["balanced"]:
        raise typer.Exit(1)


@contextlib.contextmanager
def reading_again() -> "Iterator[Progress]":
    """Tells a person how far it is; a script is told nothing."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("reading sealed files again"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _facts(found: dict[str, Any]) -> Iterator[Fact]:
    yield Fact("planned", f"{found['planned']:>9,}")
    yield Fact("delivered", f"{found['delivered']:>9,}  in {facts.counted(found['steps'], 'step')}")
    yield Fact("filtered", f"{sum(found['filtered'].values()):>9,}  {facts.listed(found['filtered'])}".rstrip())
    yield Fact("in flight", f"{found['in_flight']:>9,}")
    yield Fact("dead", f"{found['dead']:>9,}")
    yield Fact("fenced", f"{found['fenced']:>9,}  late answers, not counted")
    for cause in found["dead_jobs"]:
        yield Fact("died", f"{facts.counted(cause['jobs'], 'job')} of {cause['kind']}: {cause['error']}")
    for problem in found["problems"]:
        yield Fact("problem", problem, alarm=True)
    yield verdict(found)


def verdict(found: dict[str, Any]) -> Fact:
    if found["balanced"]:
        return Fact("verdict", f"It adds up: {facts.equation(found)}.")
    problems = facts.counted(len(found["problems"]), "problem")
    return Fact("verdict", f"It does NOT add up: {facts.equation(found)}; {problems}.", alarm=True)

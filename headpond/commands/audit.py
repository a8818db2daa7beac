"""`headpond audit RUN_DIR`: accounts for every rollout of a run."""

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headpond.commands import facts
from headpond.commands.facts import Fact
from headpond.commands.output import Json, print_end
from headpond.commands.status import RunDir

if TYPE_CHECKING:
    from headpond.inspection.audit import Progress


def audit(
    run_dir: RunDir,
    full: Annotated[bool, typer.Option("--full", help="Read every file again, not only those of new steps.")] = False,
    as_json: Json = False,
) -> None:
    """Check that every rollout of a run is accounted for.

    Every planned rollout must be delivered in exactly one step, filtered for a reason, in flight, or dead with an
    error. Compares the ledger with every manifest, and checks the checksum of every file that they name and that is not
    released; files that the end of `headpond run` has checked are read again with `--full` only. Changes nothing, and
    works while the run continues. The exit code is 1 if there is a problem.
    """
    from headpond.inspection.audit import Scope
    from headpond.inspection.audit import audit as audit_run

    with checksum_progress() as progress:
        result = audit_run(run_dir, progress, Scope.FULL if full else Scope.NEW_FILES)
    print_end(result, _facts(result), balanced=result["balanced"], as_json=as_json)


@contextlib.contextmanager
def checksum_progress() -> "Iterator[Progress]":
    """A progress bar on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("checking files"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _facts(result: dict[str, Any]) -> Iterator[Fact]:
    yield Fact("planned", f"{result['planned']:>9,}")
    yield Fact("delivered", f"{result['delivered']:>9,}  in {facts.counted(result['steps'], 'step')}")
    yield Fact("filtered", f"{sum(result['filtered'].values()):>9,}  {facts.listed(result['filtered'])}".rstrip())
    yield Fact("in flight", f"{result['in_flight']:>9,}")
    yield Fact("dead", f"{result['dead']:>9,}")
    yield Fact("fenced", f"{result['fenced']:>9,}  late results, not counted")
    for cause in result["dead_jobs"]:
        yield Fact("died", f"{facts.counted(cause['jobs'], cause['kind'] + ' job')}: {cause['error']}")
    for problem in result["problems"]:
        yield Fact("problem", problem, alarm=True)
    yield from not_read(result)
    yield verdict(result)


def not_read(result: dict[str, Any]) -> Iterator[Fact]:
    """What an earlier audit has checked and this one has not."""
    if result["files_from"]:
        what = "manifests and files" if result["manifests_from"] else "files"
        steps = facts.counted(result["files_from"], "earlier step")
        yield Fact("not read", f"{what} of {steps}, audited before: headpond audit --full reads them again")


def verdict(result: dict[str, Any]) -> Fact:
    if result["balanced"]:
        return Fact("verdict", f"balanced: {facts.equation(result)}")
    problems = facts.counted(len(result["problems"]), "problem")
    return Fact("verdict", f"NOT balanced, {problems}: {facts.equation(result)}", alarm=True)

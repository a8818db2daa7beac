"""`headpond gc RUN_DIR`: deletes what nothing reads again, or lists it."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from headpond.commands import facts
from headpond.commands.facts import Fact
from headpond.commands.output import Json, print_result
from headpond.commands.status import RunDir


def gc(
    run_dir: RunDir,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be deleted.")] = False,
    as_json: Json = False,
) -> None:
    """Delete files of a run that nothing reads again.

    These are files of steps that the trainer has released, files that neither ledger nor manifest names, files of other
    runs in the store, and sessions that nothing has touched for a day. A run does this itself while its orchestrator
    works, except for the last two; with `--dry-run` this command also works meanwhile. The exit code is 1 if a file
    cannot be deleted.
    """
    from headpond.commands.leftovers import collect

    result = collect(run_dir, dry_run=dry_run)
    print_result(result, _facts(result), as_json=as_json)
    if result["troubles"]:
        raise typer.Exit(1)


def _facts(result: dict[str, Any]) -> Iterator[Fact]:
    yield Fact("run", f"{result['run']} in {result['store']}")
    for kind, found in result["kinds"].items():
        example = f", e.g. {found['example']}" if found["files"] else ""
        yield Fact("", f"{found['bytes'] / 1e9:>9,.3f} GB in {facts.counted(found['files'], 'file')}: {kind}{example}")
    total = f"{result['bytes'] / 1e9:,.3f} GB in {facts.counted(result['files'], 'file')}"
    yield Fact("in total", f"{total} may be deleted" if result["dry_run"] else f"{total} deleted")
    for trouble in result["troubles"]:
        yield Fact("problem", trouble, alarm=True)

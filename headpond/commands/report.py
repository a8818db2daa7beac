"""`headpond report RUN_DIR...`: the dashboard's pages as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from headpond.commands.dashboard import RunDirs


def report(
    run_dirs: RunDirs,
    out: Annotated[Path | None, typer.Option(help="Default: report.html in the first RUN_DIR.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Directory of a tokenizer, to show the text of single tokens.")
    ] = None,
) -> None:
    """Write one HTML file with the pictures of the dashboard.

    It needs no server and loads nothing: send it, or open it in a browser. It holds the curves, the waterfall, the
    first page of each kind of rollout, and conversations and tokens of a few groups of the last steps.
    """
    from headpond.servers.dashboard.report import write_report

    print(write_report(run_dirs, out, tokenizer=tokenizer))

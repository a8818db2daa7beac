"""`headpond dashboard RUN_DIR...` and `headpond report RUN_DIR...`: runs in the browser, or as one HTML file."""

import os
from pathlib import Path
from typing import Annotated

import typer

RunDirs = Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Directories of runs, to compare several.")]
SECRET = "DASHBOARD_SECRET"  # noqa: S105 - the name of a variable


def dashboard(
    run_dirs: RunDirs,
    host: Annotated[str, typer.Option(help="Bind address. Any other than a loopback one requires a secret.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="0: any free port.")] = 7788,
    tokenizer: Annotated[
        str | None, typer.Option(help="Directory of a tokenizer, to show the text of single tokens.")
    ] = None,
    wait: Annotated[bool, typer.Option(help="Start also if a run has not begun yet; its page says so.")] = False,
) -> None:
    """Show runs in the browser: curves, the waterfall, groups, rollouts token by token.

    Reads run directories only: works during a run, after it, after a crash, and without Redis. The secret of an address
    that is not a loopback one is DASHBOARD_SECRET, or random and part of the printed URL.
    """
    from headpond.servers.dashboard import dashboard
    from headpond.servers.dashboard.run_view import RunView

    runs = [RunView(directory, tokenizer, may_begin_later=wait) for directory in run_dirs]
    secret = os.environ.get(SECRET) or None
    dashboard.serve(runs, host=host, port=port, secret=secret, ready=lambda url: print(f"dashboard: {url}", flush=True))


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

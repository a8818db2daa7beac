"""`headpond dashboard RUN_DIR...`: runs in the browser, read-only, from their directories alone."""

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
    from headpond.servers.dashboard import server
    from headpond.servers.dashboard.run_view import RunView

    runs = [RunView(directory, tokenizer, may_begin_later=wait) for directory in run_dirs]
    settings = server.Settings(host=host, port=port, secret=os.environ.get(SECRET) or None)
    server.serve(runs, settings, ready=lambda url: print(f"dashboard: {url}", flush=True))

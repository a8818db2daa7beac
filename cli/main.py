"""The command `penstock`."""

import logging
import sys

import typer

from cli import bench, inspect, run
from penstock.errors import PenstockError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The pipe between inference server and trainer in LLM reinforcement learning.",
)
app.command("run")(run.run)
app.command("status")(inspect.status)
app.command("audit")(inspect.audit)
app.command("bench")(bench.bench)


def main() -> None:
    logging.captureWarnings(True)
    try:
        app()
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        sys.exit(2)

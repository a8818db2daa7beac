"""Entry point of the command `headpond`: a module per subcommand. A `HeadpondError` is printed without a traceback."""

import logging
import sys
from typing import Annotated

import typer

from headpond.commands import (
    audit,
    bundle,
    dashboard,
    dead,
    demo,
    doctor,
    engine,
    gc,
    init,
    record,
    redis_server,
    redo,
    run,
    sessions,
    status,
    trial,
    up,
    why,
)
from headpond.commands.facts import printable
from headpond.config.old_names import refuse_old_variables
from headpond.errors import HeadpondError
from headpond.processes.privacy import forbid_inspection

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="The pipe between inference server and trainer in LLM reinforcement learning.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import platform

        from headpond.version import release

        typer.echo(f"headpond {release()}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the subcommand."""


COMMANDS = {
    "demo": demo.demo,
    "init": init.init,
    "up": up.up,
    "run": run.run,
    "doctor": doctor.doctor,
    "try": trial.try_environments,
    "status": status.status,
    "why": why.why,
    "dead": dead.dead,
    "bundle": bundle.bundle,
    "audit": audit.audit,
    "gc": gc.gc,
    "redis": redis_server.redis,
    "dashboard": dashboard.dashboard,
    "report": dashboard.report,
    "redo": redo.redo,
    "sessions": sessions.sessions,
    "record": record.record,
    "engine": engine.engine,
}
for name, command in COMMANDS.items():
    app.command(name)(command)


def main() -> None:
    logging.captureWarnings(True)
    try:
        forbid_inspection()
        refuse_old_variables()
        app()
    except HeadpondError as error:
        print(f"headpond: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)

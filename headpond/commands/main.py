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


app.command("demo")(demo.demo)
app.command("init")(init.init)
app.command("up")(up.up)
app.command("run")(run.run)
app.command("doctor")(doctor.doctor)
app.command("try")(trial.try_environments)
app.command("status")(status.status)
app.command("why")(why.why)
app.command("dead")(dead.dead)
app.command("bundle")(bundle.bundle)
app.command("audit")(audit.audit)
app.command("gc")(gc.gc)
app.command("redis")(redis_server.redis)
app.command("dashboard")(dashboard.dashboard)
app.command("report")(dashboard.report)
app.command("redo")(redo.redo)
app.command("sessions")(sessions.sessions)
app.command("record")(record.record)
app.command("engine")(engine.engine)


def main() -> None:
    logging.captureWarnings(True)
    try:
        forbid_inspection()
        refuse_old_variables()
        app()
    except HeadpondError as error:
        print(f"headpond: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)

"""`headpond up CONFIG.toml`: options, output and exit code."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headpond.commands.facts import Fact
from headpond.commands.output import CONFIG_HELP, Json, print_end, showing_run

if TYPE_CHECKING:
    from headpond.commands.launcher.local_run import LocalRun
    from headpond.config import RunConfig
    from headpond.records.status import Status


def up(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG.toml", help=CONFIG_HELP, show_default=False)] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Directory of the run. An existing run is resumed.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps of the run.")] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Rollout workers on this machine.")] = 1,
    join: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Start only workers, for the run whose Redis is at this address."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run everything that a run needs on this machine, in one terminal.

    Starts Redis (unless redis_url is set), the engine and the trainer (where engine.command and trainer.command say
    how), a session server (unless sessions.urls is set), the workers, the orchestrator and the dashboard, on free
    ports. Starts again what dies. Logs are in RUN_DIR/logs. Ctrl-C finishes the running jobs, Ctrl-C twice stops at
    once; the same command resumes the run. Nothing is left running, however it ends.
    """
    from headpond import config as configuration
    from headpond.config.sources import CONFIG_VARIABLE

    settings = configuration.load(config, flags={"run_dir": run_dir, "steps": steps})
    from headpond.commands.interrupts import Interrupts
    from headpond.commands.launcher.local_run import LocalRun
    from headpond.inspection import run_json

    if (settings.run_dir / "run.json").exists():
        run_json.read(settings.run_dir)  # a run that cannot be resumed is refused before anything is started
    if config is None and CONFIG_VARIABLE in os.environ:
        config = Path(os.environ[CONFIG_VARIABLE])
    environment = {**os.environ, **({"HEADPOND_STEPS": str(steps)} if steps else {})}
    settings = settings.model_copy(update={"run_dir": settings.run_dir.resolve()})
    run = LocalRun(settings, Interrupts(), config=config, environment=environment, workers=workers, joined=join)
    with showing_run(as_json=as_json, more_facts=lambda: run.facts) as on_status:
        run.run(on_status)
    if run.status:
        _print_end(settings, run, run.status, as_json=as_json)


def _print_end(settings: "RunConfig", run: "LocalRun", status: "Status", *, as_json: bool) -> None:
    from headpond.commands import curve
    from headpond.commands.audit import checksum_progress
    from headpond.commands.run import summary
    from headpond.inspection.audit import audit_at_end
    from headpond.servers.dashboard.report import write_report
    from headpond.store import open_store

    logging.getLogger("headpond").setLevel(logging.WARNING)
    with checksum_progress() as progress:
        result: dict[str, Any] = audit_at_end(settings.run_dir, progress)
    result |= {"files_from": 0}  # those were read by the orchestrator's own audit, a moment ago
    report = write_report([settings.run_dir])
    content = {**status.model_dump(), "audit": result, "restarts": run.restarts, "report": str(report)}
    batches = open_store(settings.store_url).location("batches")
    lines = summary(status, result, batches, reward=curve.first_and_last(settings.run_dir))
    print_end(content, [*lines, Fact("report", str(report))], balanced=result["balanced"], as_json=as_json)

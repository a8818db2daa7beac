"""`penstock run CONFIG.toml`: the orchestrator of a run, with a live view on a terminal."""

import contextlib
import logging
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import facts
from cli.audit import reading_again, verdict
from cli.facts import Fact
from cli.output import LOG_FORMAT, Json, on_terminal, print_facts, print_json

if TYPE_CHECKING:
    from orchestrator.reporting.reporter import Watch


def run(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG.toml", help="Without it: PENSTOCK_CONFIG, or the defaults.", show_default=False),
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run lives; resumed if it is there.")] = None,
    steps: Annotated[int | None, typer.Option(help="Stop after this many steps.")] = None,
    lag_trace_s: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Name the code that blocks the loop for longer than this.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Drive a run: submit rollouts, form steps, recover what is lost.

    Resumes the run if its directory is there. Ctrl-C once finishes what is running and begins nothing; twice stops
    now. Either way nothing is lost, and the same command goes on. Settings come from the file, then from PENSTOCK_*
    variables (PENSTOCK_RECOVERY__LEASE_S=5), then from these options. Workers are started beside it:

    \b
        celery -A workers.rollouts worker -Q rollouts -c 256
        celery -A workers.compute worker -Q filtering,advantages,encoding -c 4
    """
    from penstock import config as configuration

    settings = configuration.load(config, flags={"run_dir": run_dir, "steps": steps, "lag.trace_s": lag_trace_s})
    from orchestrator import start  # after the settings: a wrong one is told before Celery is imported
    from orchestrator.ledger.audit import audit

    with _shown(live=on_terminal() and not as_json) as watch:
        status = start.run(settings, watch=watch)
    with reading_again() as progress:
        found = audit(settings.run_dir, progress)
    if as_json:
        print_json({**status, "audit": found})
    else:
        print_facts(_summary(status, found, settings.store_dir))
    if not found["balanced"]:
        raise typer.Exit(1)


@contextlib.contextmanager
def _shown(*, live: bool) -> "Iterator[Watch]":
    from orchestrator.reporting.reporter import nobody

    if live:
        from cli.live import LiveView

        with LiveView() as view:
            yield view.watch
    else:
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
        yield nobody


def _summary(status: dict[str, Any], found: dict[str, Any], store: Path) -> Iterator[Fact]:
    done = status["phase"] == "done"
    yield Fact(
        "run", f"{status['run']}: {'done' if done else 'stopped early'} after {facts.duration(status['running_s'])}"
    )
    yield Fact("steps", f"{status['step']:,} of {status['steps']:,} delivered")
    if status["step"]:
        yield Fact("batches", str(store / "batches"))
    yield verdict(found)
    if not done:
        yield Fact("resume", shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]))

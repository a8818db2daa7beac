"""`headpond run CONFIG.toml`: the orchestrator of a run."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headpond.commands import curve, facts
from headpond.commands.audit import checksum_progress, not_read, verdict
from headpond.commands.facts import Fact
from headpond.commands.output import CONFIG_HELP, Json, print_end, showing_run
from headpond.commands.status import losses

if TYPE_CHECKING:
    from headpond.config import RunConfig
    from headpond.records.status import Status


def run(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG.toml", help=CONFIG_HELP, show_default=False),
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Directory of the run. An existing run is resumed.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps of the run.")] = None,
    lag_trace_s: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Log code that blocks the event loop for longer.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the orchestrator: submit rollouts, form steps, recover.

    An existing run is resumed. Ctrl-C finishes the running jobs and starts no new ones; Ctrl-C twice stops at once.
    In both cases no result is lost, and the same command resumes the run. Options override HEADPOND_* variables
    (HEADPOND_RECOVERY__LEASE_S=5), which override the file. Start workers separately, with the same settings:

    \b
        celery -A headpond.workers.rollouts worker -Q rollouts -c 256
        celery -A headpond.workers.compute worker -c 4 \\
          -Q filtering,advantages,encoding
    """
    from headpond import config as configuration

    settings = configuration.load(config, flags={"run_dir": run_dir, "steps": steps, "lag.trace_s": lag_trace_s})
    unchecked = _check_engine(config, settings)
    from headpond.inspection.audit import audit_at_end
    from headpond.orchestrator import (
        start,  # after the settings, so that a wrong one is reported before Celery is imported
    )
    from headpond.store import open_store

    with showing_run(as_json=as_json) as on_status:
        status = start.run(settings, on_status=on_status, engine_check=unchecked)
    with checksum_progress() as progress:
        result = audit_at_end(settings.run_dir, progress)
    batches = open_store(settings.store_url).location("batches")
    lines = summary(status, result, batches, reward=curve.first_and_last(settings.run_dir))
    print_end({**status.model_dump(), "audit": result}, lines, balanced=result["balanced"], as_json=as_json)


def _check_engine(config: Path | None, settings: "RunConfig") -> list[str] | None:
    """Refuse a start if every rollout would fail or be spoilt, in the engine's words. The command of the check if no
    replica answers: the run repeats it before its first rollout. In a child process: a dialect may be code of the user,
    which never runs in the orchestrator's."""
    import asyncio

    from headpond.errors import ConfigError
    from headpond.orchestrator.serving.engine_check import examined

    if not settings.engine.check:
        return None
    command = [sys.executable, "-m", "headpond.doctor", *([str(config)] if config else [])]
    found = asyncio.run(examined(command))
    if refused := found.get("refused"):
        raise ConfigError(f"{refused}. Then run the same command again; `headpond doctor` shows more")
    again = found.get("away", found.get("busy"))
    if again:
        print(f"the engine was not checked: {again}\nThe run checks it before its first rollout.", file=sys.stderr)
    if unchecked := found.get("unchecked"):
        print(f"the engine was not checked: {unchecked}", file=sys.stderr)
    for noted in found.get("notes", ()):
        print(f"note: {noted}", file=sys.stderr)
    return command if again else None


def summary(status: "Status", result: dict[str, Any], batches: str, *, reward: str | None) -> Iterator[Fact]:
    """The end of a run. The command that resumes it is the one that was typed. `reward`: how it went."""
    done = status.phase == "done"
    ended = "done" if done else "stopped before its last step"
    yield Fact("run", f"{status.run}: {ended} after {facts.duration(status.running_s)}")
    yield Fact("steps", f"{status.step:,} of {status.steps:,} delivered")
    if reward:
        yield Fact("reward", reward)
    yield from facts.evaluations(status)
    for note in status.notes:
        yield Fact("note", note)
    if result["dead"]:
        yield from losses(status.losses, result["dead_jobs"])
    if status.step:
        yield Fact("batches", batches)
    yield from not_read(result)
    yield verdict(result)
    if not done:
        yield Fact("resume", shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]))

"""`penstock status RUN_DIR`: what a run is doing and what it waits for, with or without its processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from cli import facts
from cli.facts import Fact
from cli.output import Json, print_facts, print_json

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory: run_dir of its configuration.")]


def status(run_dir: RunDir, as_json: Json = False) -> None:
    """Show what a run is doing, and what it waits for.

    Reads the run directory, its ledger and its Redis (PENSTOCK_REDIS_URL, or the address that the run was started
    with; a password comes only from the environment), and changes nothing. Works while the run goes on, after it, and
    when parts of it are gone.
    """
    from orchestrator.reporting.status import status as look
    from penstock import config

    found = look(run_dir, config.redis_url())
    if as_json:
        print_json(found)
    else:
        print_facts(_facts(found))


def _facts(found: dict[str, Any]) -> Iterator[Fact]:
    yield Fact("run", f"{found['run']} in {found['run_dir']}")
    yield Fact("state", _state(found), alarm=found["state"] in ("silent", "stopped"))
    yield from facts.progress(found)
    if found["ledger"]["error"]:
        yield Fact("ledger", f"{found['ledger']['error']}; the counts are those of the last status", alarm=True)
    if found["redis"]["error"]:
        yield Fact("redis", found["redis"]["error"], alarm=found["state"] != "done")
    else:
        yield Fact("redis", f"{found['redis']['address']} answers")
        yield Fact("queues", facts.listed(found["queued"]))
        yield facts.workers({worker: len(jobs) for worker, jobs in found["workers"].items()})
    for process, lag in found["event_loop_lag"].items():
        yield Fact("loop lag", f"{facts.loop_lag(lag)}: {process}")
        for culprit, seconds in lag.get("blockers", {}).items():
            yield Fact("", f"blocked for {facts.duration(seconds)} by {culprit}", alarm=True)
    if found["http"]:
        yield Fact("http", f"{found['http']}/metrics, /status, /health")
    for cause in found["waiting_for"]:
        yield Fact("waits for", cause, alarm=True)


def _state(found: dict[str, Any]) -> str:
    process = found["process"]
    who = f", process {process['pid']} on {process['host']}" if process else ""
    when = f", last sign {facts.duration(found['status_age_s'])} ago" if found["status_age_s"] is not None else ""
    draining = ", draining" if found["state"] == "running" and found["phase"] == "draining" else ""
    return f"{found['state']}{draining}{who}{when}"

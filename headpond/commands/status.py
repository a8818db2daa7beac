"""`headpond status RUN_DIR`: progress of a run, and what it waits for."""

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headpond.commands import facts
from headpond.commands.facts import Fact
from headpond.commands.output import Json, print_result

if TYPE_CHECKING:
    from headpond.inspection.status import Seen

# what `--json` leaves out: Redis and the ledger have newer values, or none
ONLY_IN_FILE = {"at", "policy_version", "replies_refused", "waiting_jobs", "submitted_jobs", "running_by_worker",
                "stored_bytes", "other_loops"}  # fmt: skip
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of the run: run_dir of its configuration.")]


def status(run_dir: RunDir, as_json: Json = False) -> None:
    """Show the progress of a run, and what it waits for.

    Reads the run directory, the ledger and Redis, and changes nothing. Works during and after a run, and without
    Redis. The Redis address is HEADPOND_REDIS_URL or that of the run; a password is read from the environment only.
    """
    from headpond.config import redis_address
    from headpond.inspection.status import status as read_status

    result = read_status(run_dir, redis_address.from_environment())
    print_result(result.model_dump(exclude=ONLY_IN_FILE), _facts(result), as_json=as_json)


def _facts(result: "Seen") -> Iterator[Fact]:
    yield Fact("run", f"{result.run} in {result.run_dir}")
    yield Fact("state", _state(result), alarm=result.state in ("silent", "stopped"))
    yield from facts.progress(result)
    yield from losses(result.losses, result.deaths)
    yield from _changed_settings(result.changed_settings)
    if result.ledger["error"]:
        yield Fact("ledger", f"{result.ledger['error']}; counts are from the last status", alarm=True)
    if result.redis["error"] and result.state == "done":
        yield Fact("redis", f"{result.redis['address']} is not reachable; the run is done and does not need it")
    elif result.state == "stopped" and (error := result.redis["error"]) and error not in result.waiting_for:
        yield Fact("redis", f"{result.redis['address']} is not running; `headpond up` starts it again")
    elif result.redis["error"]:
        yield Fact("redis", result.redis["error"], alarm=True)
    else:
        yield Fact("redis", f"{result.redis['address']} is reachable")
        yield Fact("queues", facts.listed(result.queued))
        yield facts.workers({worker: len(jobs) for worker, jobs in result.workers.items()})
    yield from facts.replicas(result.replicas)
    for process, lag in result.event_loop_lag.items():
        yield Fact("loop lag", f"{facts.loop_lag(lag)}: {process}")
        for culprit, seconds in lag.get("blockers", {}).items():
            yield Fact("", f"blocked for {facts.duration(seconds)} by {culprit}", alarm=True)
    if result.http:
        yield Fact("http", f"{result.http}/metrics, /status, /health")
    for note in result.notes:
        yield Fact("note", note)
    for why in result.excluded_workers.values():
        if why not in result.waiting_for:
            yield Fact("worker", why, alarm=True)
    for cause in result.waiting_for:
        yield Fact("waits for", cause, alarm=True)


def losses(late: Mapping[str, Any], deaths: Iterable[Mapping[str, Any]]) -> Iterator[Fact]:
    """What rollouts are lost to: of late, while the run reports it, else since the beginning."""
    for death in late.get("died", []):
        yield Fact("died", f"{death['rollouts']:,} of the last {late['rollouts']:,}: {death['error']}", alarm=True)
    if late.get("dropped"):
        yield Fact("dropped", f"of the last {late['rollouts']:,}: {facts.listed(late['dropped'])}")
    if late.get("masked"):
        yield Fact("masked", f"of the last {late['rollouts']:,}, no loss because of {facts.listed(late['masked'])}")
    if not late.get("died"):
        for death in deaths:
            yield Fact("dead", f"{facts.counted(death['jobs'], death['kind'] + ' job')}: {death['error']}", alarm=True)


def _changed_settings(changed: list[dict[str, Any]]) -> Iterator[Fact]:
    """What the last resume that changed settings has changed."""
    for change in changed:
        if change["at"] == changed[-1]["at"]:
            age = facts.duration(max(0.0, time.time() - change["at"]))
            restart = f"; restart {' and '.join(change['restart'])} that started before" if change["restart"] else ""
            text = f"{change['setting']}: {change['was']!r} until {age} ago, now {change['now']!r}{restart}"
            yield Fact("changed", text, alarm=bool(change["restart"]))


def _state(result: "Seen") -> str:
    process = result.process
    process_text = f", process {process.pid} on {process.host}" if process else ""
    updated = f", last updated {facts.duration(result.status_age_s)} ago" if result.status_age_s is not None else ""
    draining = ", draining" if result.state == "running" and result.phase == "draining" else ""
    return f"{result.state}{draining}{process_text}{updated}"

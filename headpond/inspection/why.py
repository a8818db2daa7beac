"""What a run waits for: what it reports itself, and what can be seen from outside while it cannot report, or not yet.

The first cause is the one to look at. Also for a run that has crashed: from its directory, its ledger, its last status.
"""

import http.client
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import redis

from headpond.batches.signals import last_signal_at, read_trainer
from headpond.broker import redis_keys
from headpond.broker.queues import WorkerKind
from headpond.errors import BatchError, LedgerError, RunError
from headpond.event_loop.loop_lag import blocked_cause
from headpond.ids import LeaseId, LeaseValue, RolloutId
from headpond.inspection import run_json, up_file
from headpond.inspection.run_state import State, owns_redis
from headpond.inspection.status import Seen, full_disks, open_redis, status
from headpond.ledger import histories, queries, schema

LATE_S = 4.0  # a status comes every second
ANSWER_S = 1.0  # for an engine; one that is busy still accepts the connection
ENGINES_ASKED = 8
EVENTS_SHOWN = 8
SHOWN = {"run", "run_dir", "state", "status_age_s", "step", "steps", "losses", "deaths", "queued", "replicas"}
FORMS = "name a rollout, such as g0000012-3, or the number of a step"


def why(directory: Path, redis_url: str | None = None) -> dict[str, Any]:
    """`redis_url` overrides the address in run.json, which has no password."""
    seen = status(directory, redis_url)
    next_step = seen.next_step
    for job in (job for group in next_step.get("groups", []) for job in group["jobs"]):
        job["replica"] = seen.asked.get(job["job"])
    parts, reported = _of_the_parts(directory, seen), _reported(seen)
    causes = [*of_the_end(seen), *parts, *reported]
    if seen.state is State.STOPPED:
        causes, next_step = [*reported, *parts], of_a_stopped_run(next_step)
    if seen.state is State.RUNNING:
        causes += of_the_step(seen, next_step) if not causes else []
    return seen.model_dump(include=SHOWN) | {
        "causes": list(dict.fromkeys(causes)),
        "trainer": None if seen.state is State.DONE else trainer_seen(directory),
        "next_step": next_step,
        "events": _events(directory, seen, next_step),
        "workers": workers_seen(seen),
        "notes": [*seen.notes, *_restarts(seen)],
    }


def of_a_stopped_run(next_step: dict[str, Any]) -> dict[str, Any]:
    """What was running is interrupted; when a group or a job would have ended holds no more."""
    groups = [group | {"next": None, "jobs": [*map(_stopped, group["jobs"])]} for group in next_step.get("groups", [])]
    return next_step | {"groups": groups, "jobs": [*map(_stopped, next_step.get("jobs", []))]}


def _stopped(job: dict[str, Any]) -> dict[str, Any]:
    if job["state"] == "running":
        over = {"state": "interrupted", "worker": None, "running_s": None}
        return job | over | {"next": "it runs again when the run is resumed"}
    return job | {"running_s": None, "next": "it runs when the run is resumed"}


def of_the_end(seen: Seen) -> list[str]:
    if seen.state is not State.DONE:
        return []
    complete = bool(seen.steps) and seen.step >= seen.steps
    done = [f"the run is done: {seen.step} of {seen.steps} steps are delivered"]
    return done if complete else seen.notes or done  # else the notes say why it ended before its last step


def trainer_seen(directory: Path) -> dict[str, Any] | None:
    """What the trainer has done, and how long ago it last wrote a signal: a trainer that has died writes none. None if
    it has written none, as prime-rl's trainer, whose broadcasts are in another directory."""
    at = last_signal_at(directory)
    if at is None:
        return None
    try:
        state = read_trainer(directory)
    except (BatchError, OSError):
        return None  # the run itself says why
    version = state.policy.version if state.policy else None
    return {"acked": state.acked, "version": version, "last_signal_s": round(max(0.0, time.time() - at), 1)}


def _reported(seen: Seen) -> list[str]:
    """By the run itself, or about its silence."""
    age_s = seen.status_age_s or 0.0
    late = seen.state is State.RUNNING and age_s > LATE_S
    silent = f"the orchestrator has written no status for {age_s:.0f} s: it is paused, or it hangs"
    return [*([silent] if late else []), *seen.waiting_for]


def _of_the_parts(directory: Path, seen: Seen) -> list[str]:
    """What can be seen from here at once, before the run has noticed."""
    if seen.state is State.DONE:
        return []
    ends_with_the_run = seen.state is State.STOPPED and owns_redis(directory)
    redis_error = [seen.redis["error"]] if seen.redis["error"] and not ends_with_the_run else []
    workers = [] if redis_error or seen.state is State.STOPPED else _missing_workers(seen)
    disks = full_disks(directory, run_json.read(directory))
    ended = [each.sentence for each in up_file.read(directory)]
    return [*redis_error, *disks, *ended, *([] if ends_with_the_run else _dead_engines(seen)), *workers]


def _missing_workers(seen: Seen) -> list[str]:
    """Those that are there and do not work because their event loop is blocked; then the kinds of which none is."""
    kinds = {said.get("kind") for said in seen.present_workers.values()}
    blocked = [
        seen.excluded_workers.get(node) or blocked_cause(node, said["blocked_s"], said.get("blocked_at"))
        for node, said in seen.present_workers.items()
        if said.get("blocked_s") is not None
    ]
    return blocked + [
        f"no worker for the queues {', '.join(kind.queues)} is running: start one: {kind.command}"
        for kind in WorkerKind
        if kind.value not in kinds
    ]


def _dead_engines(seen: Seen) -> list[str]:
    """Asked from the orchestrator's host only: the URLs are those that it uses."""
    here = seen.process and seen.process.host == socket.gethostname()
    urls = list(seen.replicas)[:ENGINES_ASKED] if here else []
    with ThreadPoolExecutor(max_workers=ENGINES_ASKED) as threads:
        silent = [(url, why_not) for url, why_not in zip(urls, threads.map(why_silent, urls), strict=True) if why_not]
    return [
        f"the engine at {url} does not answer ({why_not}): start it, or correct engine.urls; nothing is lost"
        for url, why_not in silent
    ]


def why_silent(url: str, *, timeout_s: float = ANSWER_S) -> str | None:
    """Why no HTTP server answers at the URL; None if one does, whatever it says."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=timeout_s):  # noqa: S310 - http only, see engine.urls
            return None
    except urllib.error.HTTPError:
        return None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        return getattr(reason, "strerror", None) or str(reason) or "timed out"


def of_the_step(seen: Seen, next_step: dict[str, Any]) -> list[str]:
    """Nothing is wrong: what is slow."""
    step = next_step.get("step", seen.step)
    if seen.steps and step >= seen.steps:
        return [f"all {seen.steps:,} steps are delivered: the run ends when what is still running has ended"]
    match next_step.get("waits_for"):
        case "trainer":
            return [f"step {step} waits for the trainer, which has not acknowledged an earlier one: is it running?"]
        case "encoding":
            return [f"step {step} is composed and is being encoded"]
        case "groups" if next_step["groups"]:
            return [_slow_group(step, next_step["groups"][0])]
        case _:
            return [f"step {step} waits for its first groups"]


def _slow_group(step: int, group: dict[str, Any]) -> str:
    named = f"group {group['group']} ({group['environment']}, example {group['example']})"
    running = max((job for job in group["jobs"]), key=lambda job: job["running_s"] or 0.0, default=None)
    ended = {"play": f"{group['rollouts'].get('generated', 0)} of its rollouts are generated"}
    said = ended.get(group["state"], f"it is {group['state']}")
    if running is None:
        return f"step {step} waits for {named}: {said}"
    where = f" on worker {running['worker']}" if running["worker"] else f" in the queue {running['queue']}"
    if running["state"] == "waiting":
        error = f", last error: {running['error']}" if running["error"] else ""
        return f"step {step} waits for {named}: {said}; {running['job']} is waiting{error}; {running['next']}"
    since = f" for {running['running_s']:.0f} s" if running["running_s"] else ""
    asked = f", which waits for the engine at {running['replica']}" if running["replica"] else ""
    return f"step {step} waits for {named}: {said}; {running['job']} is {running['state']}{since}{where}{asked}"


def _events(directory: Path, seen: Seen, next_step: dict[str, Any]) -> list[dict[str, Any]]:
    """The last ones of what the next step waits for."""
    subjects = [f"step {next_step.get('step', seen.step)}"]
    for group in next_step.get("groups", []):
        subjects += [group["group"], *(job["job"] for job in group["jobs"])]
    try:
        with schema.reading(run_json.ledger_path(directory)) as connection:
            return histories.events_of(connection, subjects, EVENTS_SHOWN)
    except LedgerError:
        return []


def workers_seen(seen: Seen) -> dict[str, Any]:
    """What each worker says of itself; `last_seen_s` for one that has gone silent: killed, and listed until its lease
    ends. Only a running orchestrator listens."""
    silent = seen.silent_workers if seen.state is State.RUNNING else {}
    workers: dict[str, Any] = {}
    for node, said in seen.present_workers.items():
        last_seen_s = silent[node] + (seen.status_age_s or 0.0) if node in silent else None
        words = {key: said.get(key) for key in ("kind", "pid", "running", "refused")}
        workers[node] = words | {"last_seen_s": last_seen_s}
    return workers


def _restarts(seen: Seen) -> list[str]:
    """Settings that the last resume has changed and that other processes read at their start."""
    changed = seen.changed_settings
    return [
        f"{each['setting']} was {each['was']!r} and is {each['now']!r}: restart {' and '.join(each['restart'])}"
        for each in changed
        if each["restart"] and each["at"] == changed[-1]["at"]
    ]


def history(directory: Path, subject: str, redis_url: str | None = None) -> dict[str, Any]:
    """Read the history of a rollout or a step, with the leases that Redis has of it. RunError if there is none."""
    identity = run_json.read(directory)
    with schema.reading(directory / identity["ledger"]) as connection, queries.snapshot(connection):
        if subject.isdecimal():
            return histories.step(connection, int(subject)) or _unknown(
                f"step {subject} is not composed yet: `headpond why {directory}` says what the next step waits for"
            )
        if not RolloutId.match(subject):
            _unknown(f"{subject!r} is neither a rollout nor a step: {FORMS}")
        found = histories.rollout(connection, subject) or _unknown(f"the run has no rollout {subject}: {FORMS}")
    return found | {"leases": _leases(redis_url or identity["redis"], identity["run"], subject)}


def _unknown(message: str) -> dict[str, Any]:
    raise RunError(message)


def _leases(url: str, run: str, job: str) -> list[dict[str, Any]]:
    """Read the executions of this moment; none if Redis is not reachable."""
    try:
        with open_redis(url) as client:
            found: Any = list(client.hscan_iter(redis_keys.LEASES, match=f"{run}.{job}.*", count=1000))
    except (redis.RedisError, OSError):
        return []
    parsed = [(LeaseId.match(lease.decode()), LeaseValue.match(value.decode())) for lease, value in found]
    return [
        {"attempt": id.attempt, "execution": id.execution, "worker": held.worker, "replica": held.replica}
        for id, held in parsed
        if id and held
    ]

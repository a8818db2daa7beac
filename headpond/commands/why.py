"""`headpond why RUN_DIR [ROLLOUT | STEP]`: what a run waits for, and the history of a rollout or a step."""

import datetime
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from headpond.commands import facts
from headpond.commands.facts import Fact
from headpond.commands.output import Json, print_result
from headpond.commands.status import RunDir, losses

EVENT_CHARACTERS = 200
RESULT = ("turns", "prompt_tokens", "completion_tokens", "version_first", "version_last", "truncated")


def why(
    run_dir: RunDir,
    subject: Annotated[
        str | None, typer.Argument(metavar="[ROLLOUT | STEP]", help="g0000012-3, or the number of a step.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a run waits for, or what happened to a rollout or a step.

    The first cause is the one to look at. Reads the run directory, the ledger, Redis and the engine's address, and
    changes nothing. Works without any of them, and for a run that has crashed.
    """
    from headpond.config import redis_address
    from headpond.inspection import why as inspection

    if subject is None:
        result = inspection.why(run_dir, redis_address.from_environment())
    else:
        result = inspection.history(run_dir, subject, redis_address.from_environment())
    print_result(result, _facts(result) if "causes" in result else _history(result), as_json=as_json)


def _facts(result: Mapping[str, Any]) -> Iterator[Fact]:
    of = f" of {result['steps']:,}" if result["steps"] else ""
    yield Fact("run", f"{result['run']}: {result['state']}, {result['step'] or 0:,}{of} steps delivered")
    for number, cause in enumerate(result["causes"] or ["nothing is known: the run has not reported yet"]):
        yield Fact("because" if not number else "", cause, alarm=True)
    if result["trainer"]:
        yield Fact("trainer", _trainer(result["trainer"]))
    for group in result["next_step"].get("groups", []):
        yield from _group(group)
    for job in result["next_step"].get("jobs", []):
        yield Fact("job", _job(job))
    yield from losses(result["losses"], result["deaths"])
    for node, said in result["workers"].items():
        why_not = f", takes no jobs: {said['refused']}" if said["refused"] else ""
        gone = f"last seen {facts.duration(said['last_seen_s'])} ago" if said["last_seen_s"] is not None else ""
        does = gone or f"{said['running']} running{why_not}"
        yield Fact("worker", f"{node}: {does}", alarm=bool(gone or why_not))
    for event in result["events"]:
        yield Fact("event", _event(event))
    for note in result["notes"]:
        yield Fact("note", note)


def _trainer(seen: Mapping[str, Any]) -> str:
    acked = f"has acknowledged step {seen['acked']:,}" if seen["acked"] >= 0 else "has acknowledged no step"
    version = f" and published version {seen['version']:,}" if seen["version"] is not None else ""
    return f"{acked}{version}; its last signal came {facts.duration(seen['last_signal_s'])} ago"


def _group(group: Mapping[str, Any]) -> Iterator[Fact]:
    rollouts = facts.listed(group["rollouts"])
    age = f", {facts.duration(group['running_s'])} of running time" if group["running_s"] else ""
    named = f"{group['group']} ({group['environment']}, example {group['example']})"
    yield Fact("group", f"{named}: {group['state']}{age}: {rollouts}")
    if group["next"]:
        yield Fact("", group["next"])
    for alike in _alike(group["jobs"]).values():
        more = ", ".join(job["job"].removeprefix(group["group"]) for job in alike[1:])
        yield Fact("", _job(alike[0]) + (f"; the same of {more}" if more else ""))


def _alike(jobs: list[dict[str, Any]]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Jobs that differ in their names and ages only, the oldest first."""
    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for job in sorted(jobs, key=lambda job: -(job["running_s"] or 0.0)):
        key = tuple(job.get(name) for name in ("kind", "state", "worker", "replica", "attempt", "failures", "losses",
                                               "error"))  # fmt: skip
        alike.setdefault(key, []).append(job)
    return alike


def _job(job: Mapping[str, Any]) -> str:
    where = f" on {job['worker']}" if job["worker"] else f" in {job['queue']}" if job["state"] == "queued" else ""
    where += f", at {job['replica']}" if job.get("replica") else ""
    since = f" for {facts.duration(job['running_s'])}" if job["running_s"] else ""
    tried = f", attempt {job['attempt']}" if job["attempt"] > 1 else ""
    failed = f", {job['failures']} failed" if job["failures"] else ""
    lost = f", {job['losses']} lost" if job["losses"] else ""
    error = f", last error: {job['error']}" if job["error"] else ""
    return f"{job['job']} {job['state']}{where}{since}{tried}{failed}{lost}{error}; {job['next']}"


def _event(event: Mapping[str, Any]) -> str:
    at = datetime.datetime.fromtimestamp(event["at"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    detail = event["detail"][:EVENT_CHARACTERS]
    return f"{at} {event['subject']} {event['action']}{f': {detail}' if detail else ''}"


def _history(result: Mapping[str, Any]) -> Iterator[Fact]:
    if "rollout" in result:
        yield from _rollout(result)
    else:
        reward = f", mean reward {result['reward_mean']:.4g}" if result["reward_mean"] is not None else ""
        formed = f", formation {result['formation']}" if result["formation"] > 1 else ""
        yield Fact("step", f"{result['step']}: {result['state']}, {result['rollouts']:,} rollouts{reward}{formed}")
    for event in result["events"]:
        yield Fact("event", _event(event))


def _rollout(result: Mapping[str, Any]) -> Iterator[Fact]:
    step = f", step {result['step']}" if result["step"] is not None else ""
    reason = f" ({result['reason']})" if result["reason"] else ""
    yield Fact("rollout", f"{result['rollout']} of {result['environment']}, example {result['example']}")
    yield Fact("state", f"{result['state']}{reason}{step}; its group is {result['group_state']}")
    for lease in result["leases"]:
        at = f", at {lease['replica']}" if lease["replica"] else ""
        yield Fact("running", f"attempt {lease['attempt']} on worker {lease['worker']}{at}")
    if job := result["job"]:
        tried = f"{facts.counted(job['attempt'], 'attempt')}, {job['failures']} failed, {job['losses']} lost"
        error = f"; last error: {job['error']}" if job["error"] else ""
        yield Fact("job", f"{job['state']}: {tried}{error}")
    if result["duration_s"] is not None:
        yield Fact("played", f"in {facts.duration(result['duration_s'])} by attempt {result['attempt']}")
    if kept := result["result"]:
        advantage = f", advantage {result['advantage']:+.4g}" if result["advantage"] is not None else ""
        yield Fact("reward", f"{kept['reward']:.4g}{advantage}" if kept.get("reward") is not None else "unknown")
        yield Fact("result", ", ".join(f"{name} {kept[name]}" for name in RESULT if kept.get(name) is not None))
        if kept.get("policy_error"):
            yield Fact("policy", kept["policy_error"], alarm=True)
    if result["error"]:
        yield Fact("error", result["error"], alarm=True)
    for stage in result["stages"]:
        error = f": {stage['error']}" if stage["error"] else ""
        yield Fact("stage", f"{stage['kind']} {stage['state']}, attempt {stage['attempt']}{error}")

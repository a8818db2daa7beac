"""A run's status, read from outside: its last status.json, its ledger, its Redis. Read-only; each may be missing."""

import contextlib
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import orjson
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from headpond.broker import redis_keys
from headpond.broker.queues import Queue
from headpond.config.redis_address import address, explain
from headpond.errors import LedgerError
from headpond.event_loop import lag_summaries
from headpond.ids import LeaseId, LeaseValue
from headpond.inspection import run_json
from headpond.inspection.run_state import State, last_status, owns_redis, state_of, status_age_s, why_idle
from headpond.ledger import queries, schema

REDIS_TIMEOUT_S = 2.0
FULL_BYTES = 1 << 20
FROM_LAST_STATUS = ("phase", "stopped_by", "process", "running_s", "step", "steps", "rollouts", "states",
                    "rollouts_per_s", "tokens_per_s", "http", "notes", "excluded_workers", "silent_workers",
                    "evaluations", "losses", "next_step", "replicas")  # fmt: skip


NOTHING_IN_REDIS: dict[str, Any] = {
    "queued": None, "workers": {}, "asked": {}, "present_workers": {}, "event_loop_lag": {}
}  # fmt: skip


def status(directory: Path, redis_url: str | None = None) -> dict[str, Any]:
    """`redis_url` overrides the address in run.json, which has no password."""
    identity = run_json.read(directory)
    url: str = redis_url or identity["redis"]
    in_redis, held, redis_error = _read_redis(url, identity["run"])
    last = last_status(directory)
    state = state_of(directory, last, held_elsewhere=held)
    counts, ledger_error = _read_ledger(directory / identity["ledger"])
    result = {
        "run": identity["run"],
        "run_dir": str(directory.resolve()),
        "state": state,
        "status_age_s": status_age_s(last),
        "changed_settings": identity.get("changed", []),
        **{key: last.get(key) for key in FROM_LAST_STATUS},
        **counts,
        **in_redis,
        "redis": {"address": address(url), "error": redis_error},
        "ledger": {"path": str(directory / identity["ledger"]), "error": ledger_error},
    }
    if state is State.RUNNING:
        lags = in_redis["event_loop_lag"] | {"orchestrator": last["event_loop_lag"]}
        return result | {"event_loop_lag": lags, "waiting_for": last["waiting_for"]}
    idle = {"rollouts_per_s": 0.0, "tokens_per_s": 0.0, "http": None}
    redis_ended = state is State.DONE or (state is State.STOPPED and owns_redis(directory))
    unreachable = [redis_error] if redis_error and not redis_ended else []
    troubles = [*why_idle(directory, state, last), *unreachable, *full_disks(directory, identity)]
    return result | idle | {"waiting_for": troubles}


def _read_ledger(path: Path) -> tuple[dict[str, Any], str | None]:
    """The ledger's counts, or why it cannot be read: it may be on another host."""
    try:
        with schema.reading(path) as connection:
            return queries.progress(connection), None
    except LedgerError as error:
        return {}, str(error)


def _read_redis(url: str, run: str) -> tuple[dict[str, Any], bool, str | None]:
    """What Redis holds of the run, whether an orchestrator of it holds the lock, and why Redis cannot be read.

    `queued`: messages by queue. `workers`: worker -> the jobs it runs. `asked`: job -> the replica that one of its
    requests waits for. `present_workers`: node -> its `Presence`. `event_loop_lag`: process -> its last summary.
    """
    with open_redis(url) as client:
        try:
            lock: Any = client.get(redis_keys.LOCK)
            holder: dict[str, Any] = orjson.loads(lock) if lock else {}
            if holder.get("run", run) != run:
                other = f"Redis at {address(url)} serves another run: the one in {holder['run_dir']}"
                return NOTHING_IN_REDIS, False, other
            leases: Any = client.hgetall(redis_keys.LEASES)
            found = {
                "queued": {queue.value: client.llen(queue) for queue in Queue},
                **_leases(leases, run),
                "present_workers": _present(client.hgetall(redis_keys.WORKERS)),
                "event_loop_lag": {lag.process: lag.as_dict() for lag in lag_summaries.read_summaries(client)},
            }
            return found, bool(holder), None
        except (redis.RedisError, OSError) as error:
            return NOTHING_IN_REDIS, False, explain(url, error)


def open_redis(url: str) -> redis.Redis:
    """A client that neither waits long nor tries again."""
    timeouts = {"socket_timeout": REDIS_TIMEOUT_S, "socket_connect_timeout": REDIS_TIMEOUT_S}
    return redis.Redis.from_url(url, retry=Retry(NoBackoff(), retries=0), **timeouts)


def _leases(leases: dict[bytes, bytes], run: str) -> dict[str, Any]:
    workers: dict[str, list[str]] = defaultdict(list)
    asked: dict[str, str] = {}
    for lease, value in sorted(leases.items()):
        id, held = LeaseId.match(lease.decode()), LeaseValue.match(value.decode())
        if id and held and id.run == run:
            workers[held.worker].append(id.job)
            asked |= {id.job: held.replica} if held.replica else {}
    return {"workers": dict(workers), "asked": asked}


def _present(said: Any) -> dict[str, dict[str, Any]]:
    present: dict[str, dict[str, Any]] = {}
    for node, content in said.items():
        with contextlib.suppress(orjson.JSONDecodeError):
            present[node.decode()] = orjson.loads(content)
    return present


def full_disks(directory: Path, identity: dict[str, Any]) -> list[str]:
    """Which disk of the run is full."""
    disks = [directory, directory / identity["ledger"]]
    disks += [directory / identity["store"]] if "://" not in identity["store"] else []
    return [full for path in disks if (full := full_disk(path))]


def full_disk(path: Path) -> str | None:
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    full = shutil.disk_usage(existing).free < FULL_BYTES
    return f"the disk of {path} is full: free space" if full else None

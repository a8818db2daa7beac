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
from headpond.records.status import Status

REDIS_TIMEOUT_S = 2.0
FULL_BYTES = 1 << 20


class Seen(Status):
    """A status as it is seen from outside. `queued` is from Redis, the counts are from the ledger if it can be read."""

    run_dir: str
    state: State
    status_age_s: float | None
    changed_settings: list[dict[str, Any]] = []
    deaths: list[dict[str, Any]] = []
    workers: dict[str, list[str]] = {}  # worker -> the jobs it runs
    asked: dict[str, str] = {}  # job -> the replica that one of its requests waits for
    present_workers: dict[str, dict[str, Any]] = {}  # node -> its `Presence`
    redis: dict[str, str | None]
    ledger: dict[str, str | None]


def status(directory: Path, redis_url: str | None = None) -> Seen:
    """`redis_url` overrides the address in run.json, which has no password."""
    identity = run_json.read(directory)
    url: str = redis_url or identity["redis"]
    in_redis, held, redis_error = _read_redis(url, identity["run"])
    last = last_status(directory)
    state = state_of(directory, last, held_elsewhere=held)
    counts, ledger_error = _read_ledger(directory / identity["ledger"])
    lags, waits_for = in_redis.pop("event_loop_lag", {}), last.waiting_for
    if state is State.RUNNING:
        lags |= {"orchestrator": last.event_loop_lag}
    else:
        redis_ended = state is State.DONE or (state is State.STOPPED and owns_redis(directory))
        unreachable = [redis_error] if redis_error and not redis_ended else []
        waits_for = [*why_idle(directory, state, last), *unreachable, *full_disks(directory, identity)]
        counts |= {"rollouts_per_s": 0.0, "tokens_per_s": 0.0, "http": None}
    shown = {
        "run": identity["run"],
        "run_dir": str(directory.resolve()),
        "state": state,
        "status_age_s": status_age_s(last),
        "changed_settings": identity.get("changed", []),
        "queued": {},
        **counts,
        **in_redis,
        "event_loop_lag": lags,
        "waiting_for": waits_for,
        "redis": {"address": address(url), "error": redis_error},
        "ledger": {"path": str(directory / identity["ledger"]), "error": ledger_error},
    }
    return Seen.model_validate(vars(last) | shown)


def _read_ledger(path: Path) -> tuple[dict[str, Any], str | None]:
    """The ledger's counts, or why it cannot be read: it may be on another host."""
    try:
        with schema.reading(path) as connection:
            return queries.progress(connection), None
    except LedgerError as error:
        return {}, str(error)


def _read_redis(url: str, run: str) -> tuple[dict[str, Any], bool, str | None]:
    """Return what Redis holds of the run, whether its orchestrator holds the lock, and why Redis cannot be read."""
    with open_redis(url) as client:
        try:
            lock: Any = client.get(redis_keys.LOCK)
            holder: dict[str, Any] = orjson.loads(lock) if lock else {}
            if holder.get("run", run) != run:
                other = f"Redis at {address(url)} serves another run: the one in {holder['run_dir']}"
                return {}, False, other
            leases: Any = client.hgetall(redis_keys.LEASES)
            found = {
                "queued": {queue.value: client.llen(queue) for queue in Queue},
                **_leases(leases, run),
                "present_workers": _present(client.hgetall(redis_keys.WORKERS)),
                "event_loop_lag": {lag.process: lag.as_dict() for lag in lag_summaries.read_summaries(client)},
            }
            return found, bool(holder), None
        except (redis.RedisError, OSError) as error:
            return {}, False, explain(url, error)


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

"""The history of one rollout or step, from the ledger, with the leases that Redis has of it."""

from pathlib import Path
from typing import Any

import redis

from headpond import redis_keys
from headpond.errors import RunError
from headpond.ids import LeaseId, LeaseValue, RolloutId
from headpond.inspection import run_json
from headpond.inspection.status import open_redis
from headpond.ledger import histories, queries, schema

FORMS = "name a rollout, such as g0000012-3, or the number of a step"


def history(directory: Path, subject: str, redis_url: str | None = None) -> dict[str, Any]:
    """RunError if the ledger does not know it."""
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
    """Executions at this moment; none if Redis is not reachable."""
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

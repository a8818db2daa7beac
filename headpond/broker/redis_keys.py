"""The names of Headpond's keys in Redis, and when each is deleted.

One run per Redis database, so only the reply stream, which is kept until its run is resumed, has the run's id in its
name. `headpond:lag:*` is defined in `event_loop/loop_lag.py`. `_kombu.*`, `unacked*` and the queues' lists belong to
kombu and Celery.
"""

LEASES = "headpond:leases"
"""hash of `ids.LeaseId` -> `ids.LeaseValue`: workers add and remove fields, the orchestrator removes expired ones"""
LEASES_TTL_S = 3600  # longer than any outage that is waited for; workers renew it every second

ENDED = "headpond:ended"
"""string: the run that ended last. Executions of it end; if it continues, it deletes the key before its first job"""
ENDED_TTL_S = 600  # for workers that were cut off at the end

LOCK = "headpond:lock"
"""string: the orchestrator that drives the run of this database; expires"""

WORKERS = "headpond:workers"
"""hash of a worker's node name -> its `Presence`, written by each once a second; the orchestrator removes dead ones"""
WORKERS_TTL_S = 60

RUN_SETTINGS = "headpond:run-settings"
"""hash of a kind of worker -> digest of the run's settings, and `KIND:values` -> the settings, as JSON"""
ORDERS = "headpond:orders"
"""hash of a worker's node name -> `Order`: the workers in quarantine"""
ORCHESTRATOR_TTL_S = 10  # the orchestrator writes both once a second, and deletes them at its end

REPLIES_TTL_S = 7 * 24 * 3600  # a run that is resumed later than this plays its open rollouts again


def replies(run: str) -> str:
    """The run's stream of replies: trimmed behind the ledger, deleted at the end of the run."""
    return f"headpond:replies:{run}"

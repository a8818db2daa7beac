"""The names of Penstock's keys in Redis, and when each is deleted.

One run per Redis database, so only the reply stream, which is kept until its run is resumed, has the run's id in its
name. `penstock:lag:*` is defined in `runtime/loop_lag.py`; `_kombu.*`, `unacked*` and the queues' lists belong to kombu
and Celery.
"""

LEASES = "penstock:leases"
"""hash of `ids.LeaseId` -> `ids.LeaseValue`: workers add and remove fields, the orchestrator removes expired ones"""
LEASES_TTL_S = 3600  # longer than any outage that is waited for; workers renew it every second

ENDED = "penstock:ended"
"""string: the run whose open executions end, while its orchestrator waits for their leases at its end"""
ENDED_TTL_S = 60  # of an orchestrator that is killed meanwhile; a resumed one deletes it before its first job

LOCK = "penstock:lock"
"""string: the orchestrator that drives the run of this database; expires"""

WORKERS = "penstock:workers"
"""hash of a worker's node name -> its `Presence`, written by each once a second; the orchestrator removes dead ones"""
WORKERS_TTL_S = 60

RUN_SETTINGS = "penstock:run-settings"
"""hash of a kind of worker -> digest of the run's settings, and `KIND:values` -> the settings, as JSON"""
ORDERS = "penstock:orders"
"""hash of a worker's node name -> `Order`: the workers in quarantine"""
ORCHESTRATOR_TTL_S = 10  # the orchestrator writes both once a second, and deletes them at its end

REPLIES_TTL_S = 7 * 24 * 3600  # a run that is resumed later than this plays its open rollouts again


def replies(run: str) -> str:
    """The run's stream of replies: trimmed behind the ledger, deleted at the end of the run."""
    return f"penstock:replies:{run}"

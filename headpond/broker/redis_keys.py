"""The names of Headpond's keys in Redis, and when each is deleted.

A Redis database has one run. Only the reply stream has the run's id in its name, because it
exists until its run is resumed. `event_loop/lag_summaries.py` defines `headpond:lag:*`. kombu
and Celery own `_kombu.*`, `unacked*` and the queues' lists.
"""

# hash of `ids.LeaseId` -> `ids.LeaseValue`: workers add and remove fields, the orchestrator
# removes expired ones
LEASES = "headpond:leases"
LEASES_TTL_S = 3600  # Longer than any outage that a run survives. Workers renew it every second.

# string: the run that ended last; executions of it end. A run that continues deletes the key
# before its first job
ENDED = "headpond:ended"
ENDED_TTL_S = 600  # Workers that were cut off at the end read the key within this time.

LOCK = "headpond:lock"  # string: the orchestrator that drives the run of this database; expires

# hash of a worker's node name -> its `Presence`: each worker writes its own once a second, the
# orchestrator removes dead ones
WORKERS = "headpond:workers"
WORKERS_TTL_S = 60

# hash of a kind of worker -> digest of the run's settings, and `KIND:values` -> the settings, as
# JSON
RUN_SETTINGS = "headpond:run-settings"
ORDERS = "headpond:orders"  # hash of a worker's node name -> `Order`: the workers in quarantine
ORCHESTRATOR_TTL_S = 10  # The orchestrator writes both once a second, and deletes them at its end.

# A run that is resumed later than this plays its open rollouts again.
REPLIES_TTL_S = 7 * 24 * 3600


def replies(run: str) -> str:
    """Name the run's stream of replies. The stream is trimmed behind the ledger and deleted at
    the end of the run."""
    return f"headpond:replies:{run}"

"""The names of everything Penstock keeps in Redis, with who removes it.

One run per Redis database, so only what must survive between runs side by side carries the run's id.
`_kombu.*`, `unacked*` and the queues' lists belong to kombu and Celery.
"""

LEASES = "penstock:leases"
"""hash, field `<job>.<attempt>.<execution>` -> `<worker>:<beat>`; workers add and remove, the orchestrator clears up"""
LEASES_TTL_S = 3600  # outlives any outage worth waiting for; workers renew it every second

LOCK = "penstock:lock"
"""string: which orchestrator drives the run of this database; ends with its TTL"""

REPLIES_TTL_S = 7 * 24 * 3600  # a run that nobody resumes for a week runs its open rollouts again


def replies(run: str) -> str:
    """The run's stream of replies: trimmed behind the ledger, deleted at the run's end."""
    return f"penstock:replies:{run}"

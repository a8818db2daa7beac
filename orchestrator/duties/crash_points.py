"""Points in the write-ahead order. Tests replace `passed`, and kill the orchestrator there."""

POINTS = (
    "planned",  # groups are in the ledger, nothing is submitted
    "submitted",  # the jobs are submitted in the ledger, nothing is published
    "published",  # published, and nothing else has happened
    "replies_read",  # replies are read, their effects are not committed
    "replies_committed",  # committed, the stream is not trimmed
    "composed",  # the step is in the ledger, its batch phase or its encoding is not submitted
    "estimated",  # the result of its batch phase is in the ledger, its encoding is not submitted
    "encoded",  # every rank has replied, there is no manifest
    "sealed",  # the manifest is on disk, the step is not delivered in the ledger
    "delivered",  # the step is delivered in the ledger
)


def passed(point: str) -> None:
    """Do nothing."""

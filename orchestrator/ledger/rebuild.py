"""Rebuilds a lost ledger from the manifests: sealed steps are delivered, open work is planned again under new ids."""

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing

from orchestrator.ledger.records import ESTIMATOR_STATE, BatchRecord, GroupRecord, RolloutRecord, Row
from penstock.batches import BatchRollout, Manifest, manifest_steps, read_manifest
from penstock.config import RunConfig
from penstock.ids import GroupId
from penstock.ledger.schema import STATEMENTS, open_for_writing
from penstock.ledger.states import BatchState, GroupState, RolloutState
from penstock.store import atomic, open_store

logger = logging.getLogger("penstock.ledger")

UNKNOWN = -1  # manifests do not name examples


def rebuild_if_lost(config: RunConfig) -> None:
    """Rebuild when there is no ledger but there are manifests."""
    if config.ledger_path.exists():
        return
    store = open_store(config.store_url)
    steps = manifest_steps(store)
    if not steps:
        return
    logger.warning("action=ledger_rebuilt path=%s from_steps=%d", config.ledger_path, len(steps))
    replacing = atomic.replacing(config.ledger_path, suffix="rebuilding")
    with replacing as temporary, closing(open_for_writing(temporary)) as connection:
        _fill(connection, filter(None, (read_manifest(store, step) for step in steps)), config.rollouts.group_size)
        connection.execute("PRAGMA journal_mode = DELETE")  # a single file, so that the rename is atomic


def _fill(connection: sqlite3.Connection, manifests: Iterator[Manifest], group_size: int) -> None:
    planned = last_ordinal = delivered_bytes = step = 0
    estimator_state = ""
    connection.execute("BEGIN")
    for manifest in manifests:  # in order
        step, estimator_state = manifest.plan.step, manifest.estimator_state
        connection.execute(STATEMENTS["batches"], BatchRecord(step=step, formation=1, state=BatchState.DELIVERED).row())
        sealed = {rollout.rollout: rollout for rollout in manifest.plan.rollouts}
        for id, environment in {rollout.group: rollout.env for rollout in sealed.values()}.items():
            ordinal = GroupId.parse(id).ordinal
            group = GroupRecord(
                id=id, ordinal=ordinal, environment=environment, example=UNKNOWN, state=GroupState.CLOSED
            )
            rows = _rollouts(id, group_size, step, sealed)
            connection.execute(STATEMENTS["groups"], group.row())
            connection.executemany(STATEMENTS["rollouts"], rows)
            planned += len(rows)
            last_ordinal = max(last_ordinal, ordinal)
        blobs = [blob for rollout in sealed.values() for blob in (rollout.columns, rollout.experts) if blob]
        delivered_bytes += sum(blob.size for blob in blobs)
    # The ordinals of open groups are unknown: leave room, so that no id is used twice.
    counters = {
        "groups_planned": last_ordinal + 1_000_000,
        "steps_delivered": step + 1,
        "delivered_bytes": delivered_bytes,
        ESTIMATOR_STATE: estimator_state,
    }
    connection.executemany(STATEMENTS["meta"], [("rollouts_planned", planned), *counters.items()])
    connection.execute("COMMIT")


def _rollouts(group: str, size: int, step: int, sealed: dict[str, BatchRollout]) -> list[Row]:
    """Rows of a group: delivered if the manifest names the rollout, else filtered."""
    rollouts = [
        RolloutRecord(group=group, index=index, step=step, state=RolloutState.DELIVERED) for index in range(size)
    ]
    for rollout in rollouts:
        if rollout.id in sealed:
            rollout.advantage = sealed[rollout.id].advantage
        else:
            rollout.state, rollout.reason, rollout.step = RolloutState.FILTERED, "ledger_lost", None
    return [rollout.row() for rollout in rollouts]

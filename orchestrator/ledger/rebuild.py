"""Rebuilds a lost ledger from the manifests: sealed steps are delivered, open work is planned again under new ids.

The first steps whose files the trainer no longer needs, and which are gone, were released."""

import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing

from headpond.batches import BatchRollout, Manifest, manifest_steps, read_manifest
from headpond.batches.plan import FIRST_STEP
from headpond.config import RunConfig
from headpond.ids import ROLLOUTS_FOLDER, GroupId, execution_of
from headpond.ledger.archive import archive
from headpond.ledger.schema import STATEMENTS, open_for_writing
from headpond.ledger.sealed_files import files_of
from headpond.ledger.state_rows import RunState
from headpond.ledger.states import BatchState, GroupState, RolloutState
from headpond.orchestrator.ledger.rows import BatchRecord, GroupRecord, RolloutRecord, Row
from headpond.orchestrator.run_dir import EVALUATIONS
from headpond.records.rollout import RolloutResult
from headpond.store import Store, atomic, open_store

logger = logging.getLogger("headpond.ledger")

UNKNOWN = -1  # manifests do not name examples
LOST = "ledger_lost"
RESULT = 6  # column of a rollout's result

# kind of `RELEASED` -> the first step whose files of that kind the trainer may still read
Releasable = Mapping[str, int]


def rebuild_if_lost(config: RunConfig, releasable: Callable[[], Releasable] = dict[str, int]) -> None:
    """Rebuild when there is no ledger but there are manifests, or files of rollouts: these are played under new ids."""
    if config.ledger_path.exists():
        return
    store = open_store(config.store_url)
    steps = manifest_steps(store)
    if not steps and not store.names(ROLLOUTS_FOLDER):
        return
    logger.warning("action=ledger_rebuilt path=%s from_steps=%d", config.ledger_path, len(steps))
    replacing = atomic.replacing(config.ledger_path, suffix="rebuilding")
    with replacing as temporary, closing(open_for_writing(temporary)) as connection:
        released = Released(store, releasable(), first_step=steps[0] if steps else FIRST_STEP)
        manifests = filter(None, (read_manifest(store, step) for step in steps))
        _fill(connection, manifests, config, released)
        connection.execute("PRAGMA journal_mode = DELETE")  # a single file, so that the rename is atomic


class Released:
    """Which steps were released, as the ledger counted them. A step that the trainer has released since, or of which
    files are left, is released again."""

    def __init__(self, store: Store, releasable: Releasable, *, first_step: int) -> None:
        self._store = store
        self._releasable = releasable
        # manifests before `first_step` are deleted after every other file
        self.counters = {counter: min(first_step, first_kept) for counter, first_kept in releasable.items()}
        self.held_bytes = 0  # of rollouts' files that are not released

    def add(self, manifest: Manifest) -> None:
        """Manifests in order."""
        step, files = manifest.plan.step, [file for file in files_of(manifest) if file.ref.size]  # others have no file
        for counter in self._releasable.keys() - {"manifests_released"}:
            if self.counters[counter] == step < self._releasable[counter]:
                first = next((file.ref.key for file in files if file.released == counter), None)
                self.counters[counter] += first is None or self._store.size(first) is None
        held = [file for file in files if file.of_rollout and self.counters.get(file.released, 0) <= step]
        self.held_bytes += sum(file.ref.size for file in held)


def _fill(connection: sqlite3.Connection, manifests: Iterator[Manifest], config: RunConfig, released: Released) -> None:
    last_ordinal = 0
    step = FIRST_STEP - 1
    states = Counter[str]()
    estimator_state = None
    connection.execute("BEGIN")
    for manifest in manifests:  # in order
        step, estimator_state = manifest.plan.step, manifest.estimator_state
        sealed = {rollout.rollout: rollout for rollout in manifest.plan.rollouts}
        batch = BatchRecord(step=step, formation=1, state=BatchState.DELIVERED, delivered=len(sealed))
        connection.execute(STATEMENTS["batches"], batch.row())
        environments = {rollout.group: rollout.env for rollout in sealed.values()}
        for id, environment in environments.items():
            ordinal = GroupId.parse(id).ordinal
            group = GroupRecord(
                id=id, ordinal=ordinal, environment=environment, example=UNKNOWN, state=GroupState.CLOSED
            )
            rollouts = _rollouts(id, config.rollouts.group_size, step, sealed)
            connection.execute(STATEMENTS["groups"], group.row())
            connection.executemany(STATEMENTS["rollouts"], map(_row, rollouts))
            states.update(rollout.state for rollout in rollouts)
            last_ordinal = max(last_ordinal, ordinal)
        archive(connection, at_most=len(environments), now=time.time(), history=False)
        released.add(manifest)
    # The ordinals of open groups are unknown: leave room, so that no id is used twice.
    evaluations = config.run_dir / EVALUATIONS
    state = RunState(
        rollouts_planned=states.total(),
        groups_planned=last_ordinal + 1_000_000,
        draws=1_000_000,  # for the same reason
        steps_delivered=step + 1,
        delivered_bytes=released.held_bytes,
        evaluations_finished=evaluations.read_bytes().count(b"\n") if evaluations.exists() else 0,
    )
    state.released |= released.counters
    state.last_step.estimator_state = estimator_state
    state.rollout_counts["states"].by_name = states
    state.rollout_counts["reasons"].by_name = Counter({LOST: states[RolloutState.FILTERED]})
    connection.executemany(STATEMENTS["state"], state.take_changes()[0])
    connection.execute("COMMIT")


def _rollouts(group: str, size: int, step: int, sealed: dict[str, BatchRollout]) -> list[RolloutRecord]:
    """Rollouts of a group: delivered if the manifest names them, else filtered."""
    rollouts = [RolloutRecord(group=group, index=index) for index in range(size)]
    for rollout in rollouts:
        if named := sealed.get(rollout.id):
            rollout.state, rollout.step, rollout.advantage = RolloutState.DELIVERED, step, named.advantage
            rollout.masked = named.masked
            rollout.result = RolloutResult(
                reward=named.reward,
                columns=named.columns if named.columns.size else None,
                experts=named.experts,
                sample_lengths=named.sample_lengths,
                version_first=named.version_first,
                version_last=named.version_last,
            )
            rollout.attempt, rollout.execution = execution_of(named.columns.key) or (None, None)
        else:
            rollout.state, rollout.reason = RolloutState.FILTERED, LOST
    return rollouts


def _row(rollout: RolloutRecord) -> Row:
    """What the manifest does not say of a result stays unknown."""
    row = list(rollout.row())
    row[RESULT] = rollout.result.model_dump_json(exclude_unset=True) if rollout.result else None
    return tuple(row)

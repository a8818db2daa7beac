"""What must hold at every commit and at the end of every schedule."""

import sqlite3
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from headpond.batches import Manifest, read_manifests
from headpond.batches.manifest import manifest_key
from headpond.broker import redis_keys
from headpond.broker.queues import Queue
from headpond.commands.leftovers import OTHER_RUNS, collect
from headpond.inspection.audit import audit
from headpond.ledger import queries, schema
from headpond.ledger.sealed_files import unreleased_keys
from headpond.ledger.state_rows import RunState
from headpond.orchestrator.ledger.rows import JobRecord
from headpond.records.status import Status
from headpond.store.columns import read_columns
from headpond.tasks import envelope
from simulation.faults import OTHER_RUN
from simulation.workers import length_of, reward_of

if TYPE_CHECKING:
    from simulation.world import World

OPEN = ("waiting", "submitted")


class Commits:
    """Looks at every state of the ledger that a kill could leave."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._attempts: dict[str, int] = {}
        self._open = set[str]()
        self._closed = set[str]()
        self._manifests: dict[int, bytes] = {}
        self._sequence = 0
        """of the last submission that a kill could not undo"""

    def forget(self) -> None:
        """The ledger is lost; the manifests are not."""
        self._attempts, self._open, self._closed = {}, set(), set()
        self._sequence = 0

    def check_published(self, messages: Iterable[bytes]) -> None:
        """A message is published when its submission is in the ledger, not before."""
        for message in messages:
            sequence = envelope.sequence_of(message, self._world.run)
            if sequence is None or sequence > self._sequence:
                task = envelope.task_of(message)
                self._world.violated(f"{task} is published and not in the ledger: {sequence} after {self._sequence}")

    def check(self, connection: sqlite3.Connection) -> None:
        world = self._world
        progress = queries.progress(connection)
        self._sequence = queries.run_state(connection).sequence
        if not progress["rollouts"]["balanced"]:
            world.violated(f"a commit is not balanced: {progress}")
        # A batch phase whose result the orchestrator cannot read is done again.
        jobs = [row for row in queries.open_jobs(connection) if row[5] in OPEN and row[1] != "batch_phase"]
        open_jobs = {row[0] for row in jobs}
        self._closed |= self._open - open_jobs
        if again := open_jobs & self._closed:
            world.violated(f"jobs are open again after they were settled, dead or cancelled: {sorted(again)}")
        for row in jobs:
            if row[3] < self._attempts.get(row[0], 0):
                world.violated(f"job {row[0]} is at attempt {row[3]} after attempt {self._attempts[row[0]]}")
            self._attempts[row[0]] = row[3]
        self._open = open_jobs
        self.check_manifests(progress["step"])

    def check_manifests(self, delivered: int) -> None:
        """A sealed step never changes, and the ledger delivers nothing without a manifest."""
        world = self._world
        for step in range(delivered + 1):
            path = world.store_root / manifest_key(step)
            before = self._manifests.get(step)
            if path.exists():
                if before is None:
                    self._manifests[step] = path.read_bytes()
                elif path.read_bytes() != before:
                    world.violated(f"the manifest of step {step} has changed")
            elif before is None and step < delivered:
                world.violated(f"step {step} is delivered in the ledger and has no manifest")


def check_counts(world: "World", status: Status) -> None:
    """The counters in the memory of an orchestrator that has ended are those of its ledger's rows."""
    with schema.reading(world.config.ledger_path) as connection:
        states = queries.kept_counts(connection).states
        jobs = Counter(
            (JobRecord(id=row[0], stage=row[1], subject=row[2]).queue.value, row[5])
            for row in queries.open_jobs(connection)
        )
    counted = {state.value: number for state, number in states.items() if number}
    if counted != status.states:
        world.violated(f"the orchestrator counted {status.states}, the ledger has {counted}")
    for state in OPEN:
        said = {queue: number for queue, number in getattr(status, f"{state}_jobs").items() if number}
        rows = {queue: number for (queue, in_state), number in jobs.items() if in_state == state}
        if said != rows:
            world.violated(f"the orchestrator counted {said} {state} jobs, the ledger has {rows}")


def check_end(world: "World") -> None:
    """After the run is done and its command has been run once more, with every worker idle."""
    result = audit(world.config.run_dir)
    if not result["balanced"]:
        world.violated(f"the audit: {result['problems'][:5]} {result}")
    if result["in_flight"]:
        world.violated(f"{result['in_flight']} rollouts are in flight in a run that is done")
    manifests = read_manifests(world.store)
    with schema.reading(world.config.ledger_path) as connection:
        state, released = queries.run_state(connection), queries.released_steps(connection)
        _check_ledger(world, connection, state)
    _check_manifests(world, manifests, released)
    _check_files(world, manifests, released)
    _check_bytes(world, manifests, state, released)
    _check_redis(world)
    _check_environments(world, manifests, released)
    left = collect(world.config.run_dir, dry_run=True)
    if any(found["files"] for kind, found in left["kinds"].items() if kind != OTHER_RUNS):
        world.violated(f"headpond gc finds files after the last sweep: {left}")


def _check_ledger(world: "World", connection: sqlite3.Connection, state: RunState) -> None:
    if left := [row for row in queries.open_jobs(connection) if row[5] in OPEN]:
        world.violated(f"open jobs in a run that is done: {left[:5]}")
    if left := queries.open_groups(connection):
        world.violated(f"open groups in a run that is done: {left[:5]}")
    states = queries.kept_counts(connection).states
    if sum(states.values()) != state.rollouts_planned:
        world.violated(f"{state.rollouts_planned} rollouts planned, {sum(states.values())} rows")
    if state.steps_delivered != world.config.steps:
        world.violated(f"{state.steps_delivered} steps delivered of {world.config.steps}")
    if state.open_bytes != 0:
        world.violated(f"open_bytes is {state.open_bytes} in a run that is done")
    world.events.update(dict(connection.execute("SELECT action, count(*) FROM events GROUP BY action").fetchall()))
    world.planned, world.reasons = state.groups_planned, dict(queries.kept_counts(connection).reasons)


def _check_manifests(world: "World", manifests: dict[int, Manifest], released: dict[str, int]) -> None:
    steps = set(range(released["manifests_released"], world.config.steps))
    if manifests.keys() != steps:
        world.violated(f"manifests of steps {sorted(manifests)}, expected {sorted(steps)}")
    seen: dict[str, int] = {}
    for step, manifest in manifests.items():
        for rollout in manifest.plan.rollouts:
            if rollout.rollout in seen:
                world.violated(f"rollout {rollout.rollout} is in steps {seen[rollout.rollout]} and {step}")
            seen[rollout.rollout] = step
            if rollout.reward != reward_of(world.seed, rollout.rollout):
                world.violated(f"rollout {rollout.rollout} was delivered with the reward {rollout.reward} of another")
            if sum(rollout.sample_lengths) != length_of(world.seed, rollout.rollout) + 2:
                world.violated(f"rollout {rollout.rollout} was delivered with the length of another")
    world.delivered = sorted(seen)


def _check_files(world: "World", manifests: dict[int, Manifest], released: dict[str, int]) -> None:
    named = {"run"}
    for manifest in manifests.values():
        named |= unreleased_keys(manifest, released)
    root = world.store_root
    files = (path for path in root.rglob("*") if path.is_file() and OTHER_RUN not in path.parts)
    there = {path.relative_to(root).as_posix() for path in files}
    if missing := sorted(named - there):
        world.violated(f"files that a manifest names are missing: {missing[:5]} of {len(missing)}")
    if left := sorted(there - named):
        world.violated(f"files that nothing names are left: {left[:5]} of {len(left)}")
    if left := sorted(path.name for path in world.config.run_dir.rglob(".*")):
        world.violated(f"unfinished files are left: {left[:5]}")


def _check_environments(world: "World", manifests: dict[int, Manifest], released: dict[str, int]) -> None:
    names = sorted(world.config.environments)
    for step, manifest in manifests.items():
        for rollout in manifest.plan.rollouts if step >= released["columns_released"] else ():
            played = read_columns(world.store, rollout.columns).metrics["environment"]
            if names[int(played)] != rollout.env:
                world.violated(f"rollout {rollout.rollout} of {rollout.env} holds a rollout of {names[int(played)]}")


def _check_bytes(world: "World", manifests: dict[int, Manifest], state: RunState, released: dict[str, int]) -> None:
    held = 0
    for step, manifest in manifests.items():
        for rollout in manifest.plan.rollouts:
            held += rollout.columns.size if step >= released["columns_released"] else 0
            held += rollout.experts.size if rollout.experts and step >= released["experts_released"] else 0
    if state.delivered_bytes != held:
        world.violated(f"delivered_bytes is {state.delivered_bytes}, the manifests name {held} bytes")


def _check_redis(world: "World") -> None:
    if leases := world.redis.hgetall(redis_keys.LEASES):
        world.violated(f"leases are left: {leases}")
    if left := {queue.value: world.redis.llen(queue) for queue in Queue if world.redis.llen(queue)}:
        world.violated(f"messages are left: {left}")
    kept = (redis_keys.WORKERS, redis_keys.ENDED, redis_keys.replies(world.run), redis_keys.replies(OTHER_RUN))
    ours = {key.decode() for key in world.redis.scan("headpond:*")} - set(kept)
    if left := {key for key in ours if not key.startswith("headpond:lag:")}:
        world.violated(f"keys are left in Redis: {sorted(left)}")

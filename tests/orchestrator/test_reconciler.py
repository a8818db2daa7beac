"""Which jobs are lost: with a test clock, a real ledger, and snapshots of Redis written by hand."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.ledgers import configured, pipeline_of, replies_of, submitted
from support.waiting import Clock

from headpond.broker import redis_keys
from headpond.broker.queues import Queue
from headpond.config import RunConfig
from headpond.ledger.states import GroupState, JobState, RolloutState
from headpond.orchestrator.exchange.gates import Gates
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import GroupRecord, JobRecord
from headpond.orchestrator.reconciler import Reconciler, Snapshot
from headpond.orchestrator.workforce.leases import LEASES_AT_ONCE, read_leases, remove_leases
from headpond.processes.embedded_redis import EmbeddedRedis
from headpond.records.rollout import RolloutResult
from headpond.tasks.stage import GRACE_S, Outcome

RUN = "run"
LEASE_S = 10.0


def judge(reconciler: Reconciler, snapshot: Snapshot) -> list[str]:
    return asyncio.run(reconciler.judge(snapshot))


def reconciling(config: RunConfig, ledger: Ledger, broker: Broker, gates: Gates) -> Reconciler:
    pipeline = pipeline_of(config, ledger, gates, run=RUN)
    return Reconciler(config, RUN, ledger, broker, pipeline, replies_of(config, ledger, pipeline), gates)


class Scene:
    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        config = configured(recovery={"lease_s": LEASE_S, "max_losses": 3}, rollouts={"timeout_s": 100})
        self.clock = clock
        self.ledger = ledger
        group = submitted(ledger)
        self.job: JobRecord = ledger.jobs[group.rollouts[0].id]
        self.rollout = group.rollouts[0]
        for other in group.rollouts[1:]:
            ledger.end(ledger.jobs[other.id], JobState.CANCELLED)
        gates = Gates()
        self.reconciler = reconciling(config, ledger, Broker("redis://unused/0"), gates)
        self.poll_s = self.reconciler.poll_s

    def poll(self, *, lease: str | None = None, depth: int = 0, oldest: int | None = None) -> list[str]:
        """One poll; `lease` is the value of the job's lease."""
        leases = {f"{RUN}.{self.job.id}.{self.job.attempt}.x": lease} if lease else {}
        depths = dict.fromkeys(Queue, 0) | {Queue.ROLLOUTS: depth}
        snapshot = Snapshot(leases=leases, depths=depths, oldest=dict.fromkeys(Queue) | {Queue.ROLLOUTS: oldest})
        return judge(self.reconciler, snapshot)

    def pass_time(self, seconds: float, *, lease: str | None = None, depth: int = 0, oldest: int | None = None) -> None:
        """Poll repeatedly over `seconds`, with the same result."""
        for _ in range(round(seconds / self.poll_s)):
            self.clock.advance(self.poll_s)
            self.poll(lease=lease, depth=depth, oldest=oldest)

    @property
    def lost(self) -> int:
        return self.job.losses


@pytest.fixture
def scene(ledger: Ledger, clock: Clock) -> Scene:
    return Scene(ledger, clock)


def test_a_lease_that_beats_is_left_alone(scene: Scene) -> None:
    for beat in range(50):
        scene.pass_time(1, lease=f"worker:{beat}")
    assert scene.lost == 0
    assert scene.rollout.state is RolloutState.RUNNING


def test_a_lease_without_beats_expires_and_its_job_is_submitted_again(scene: Scene) -> None:
    scene.poll(lease="worker:1")
    scene.pass_time(LEASE_S - 1, lease="worker:1")
    assert scene.lost == 0
    scene.clock.advance(scene.poll_s)
    expired = scene.poll(lease="worker:1")
    assert scene.lost == 1
    assert scene.job.state is JobState.WAITING
    assert expired == [f"{RUN}.{scene.job.id}.1.x"]
    assert scene.job.id in scene.ledger.waiting


def test_a_beat_just_before_expiry_keeps_a_lease(scene: Scene) -> None:
    scene.poll(lease="worker:1")
    scene.pass_time(LEASE_S - 1, lease="worker:1")
    scene.pass_time(LEASE_S - 1, lease="worker:2")
    assert scene.lost == 0


def test_a_pause_of_the_orchestrator_makes_no_job_lost(scene: Scene) -> None:
    """Only time over polls that were made counts."""
    scene.poll(lease="worker:1")
    for _ in range(4):
        scene.clock.advance(3600)
        scene.poll(lease="worker:1")
    assert scene.lost == 0
    scene.pass_time(LEASE_S, lease="worker:1")
    assert scene.lost == 1


def test_a_flush_of_redis_makes_no_job_lost_at_once(scene: Scene) -> None:
    scene.pass_time(5, lease="worker:1")
    scene.pass_time(LEASE_S - 1)
    assert scene.lost == 0
    scene.pass_time(1, lease="worker:9")
    scene.pass_time(LEASE_S - 1)
    assert scene.lost == 0


def test_a_job_without_lease_and_message_is_lost(scene: Scene) -> None:
    scene.poll()
    scene.pass_time(LEASE_S)
    assert scene.lost == 0
    scene.pass_time(scene.poll_s)
    assert scene.lost == 1


def test_a_job_that_may_still_be_queued_is_not_lost(scene: Scene) -> None:
    scene.pass_time(5 * LEASE_S, depth=3, oldest=scene.job.sequence)
    scene.pass_time(5 * LEASE_S, depth=3, oldest=scene.job.sequence - 1)
    assert scene.lost == 0


def test_a_foreign_oldest_message_makes_no_job_lost(scene: Scene) -> None:
    scene.pass_time(5 * LEASE_S, depth=3, oldest=None)
    assert scene.lost == 0


def test_a_job_that_its_queue_has_passed_is_lost(scene: Scene) -> None:
    scene.pass_time(2 * LEASE_S, depth=3, oldest=scene.job.sequence + 1)
    assert scene.lost == 1


def test_time_in_the_queue_is_not_time_missing(scene: Scene) -> None:
    scene.pass_time(LEASE_S - 1)
    scene.pass_time(1, depth=1, oldest=scene.job.sequence)
    scene.pass_time(LEASE_S - 1)
    assert scene.lost == 0


def test_the_next_attempt_is_observed_from_its_own_start(scene: Scene) -> None:
    scene.poll(lease="worker:1")
    scene.pass_time(LEASE_S, lease="worker:1")
    assert scene.lost == 1
    scene.ledger.submit(scene.job)
    scene.pass_time(LEASE_S - 1)
    assert scene.lost == 1


def test_one_beating_execution_of_a_message_is_enough(scene: Scene) -> None:
    """The same message was delivered twice; one of the two workers has died."""
    name = f"{RUN}.{scene.job.id}.{scene.job.attempt}"
    for beat in range(30):
        scene.clock.advance(scene.poll_s)
        leases = {f"{name}.dead": "a:1", f"{name}.alive": f"b:{beat}"}
        snapshot = Snapshot(leases=leases, depths=dict.fromkeys(Queue, 0), oldest=dict.fromkeys(Queue))
        judge(scene.reconciler, snapshot)
    assert scene.lost == 0


def test_a_stale_lease_of_another_run_is_cleared_and_touches_no_job(scene: Scene) -> None:
    stale = Snapshot(
        leases={"other.g0000001-0.1.x": "w:1"}, depths=dict.fromkeys(Queue, 1), oldest=dict.fromkeys(Queue)
    )
    expired: list[str] = []
    for _ in range(12):
        scene.clock.advance(scene.poll_s)
        expired = judge(scene.reconciler, stale)
    assert expired == ["other.g0000001-0.1.x"]
    assert scene.lost == 0


def test_a_rollout_over_its_time_out_is_lost_and_revoked(scene: Scene) -> None:
    play = scene.reconciler._pipeline.play
    for beat in range(round(100 + GRACE_S + LEASE_S) + 5):
        scene.clock.advance(1)
        scene.poll(lease=f"worker:{beat}")
        if beat <= 100 + GRACE_S + LEASE_S:
            assert not play.take_unneeded()
    assert play.take_unneeded() == [f"{RUN}.{scene.job.id}.1"]
    assert scene.lost == 1
    assert scene.job.error is not None
    assert "over its time-out" in scene.job.error


def test_a_job_that_is_lost_too_often_is_dead(scene: Scene) -> None:
    for _ in range(3):
        scene.poll(lease="worker:1")
        scene.pass_time(LEASE_S + 1, lease="worker:1")
        if scene.job.state is JobState.WAITING:
            scene.ledger.submit(scene.job)
    assert scene.job.state is JobState.DEAD
    assert scene.rollout.state is RolloutState.DEAD
    assert scene.rollout.error is not None
    assert scene.rollout.error.startswith("lost 3 times, ")
    assert "lease" in scene.rollout.error


def timing_groups(ledger: Ledger, gates: Gates, **rollouts: Any) -> Reconciler:
    config = configured(rollouts={"group_timeout_s": 30} | rollouts)
    return reconciling(config, ledger, Broker("redis://unused/0"), gates)


def poll(reconciler: Reconciler, clock: Clock, times: int, running: str | None = None) -> None:
    """`running` is a job whose lease beats; all others may be queued."""
    for _ in range(times):
        clock.advance(reconciler.poll_s)
        leases = {f"{RUN}.{running}.1.x": f"worker:{clock.now}"} if running else {}
        snapshot = Snapshot(leases=leases, depths=dict.fromkeys(Queue, 1), oldest=dict.fromkeys(Queue))
        judge(reconciler, snapshot)


def one_unfinished(ledger: Ledger) -> GroupRecord:
    """Three of the four rollouts are generated, the last one is submitted."""
    group = submitted(ledger)
    for rollout in group.rollouts[:3]:
        ledger.end(ledger.jobs[rollout.id], JobState.SETTLED)
        ledger.generated(rollout, RolloutResult(reward=0.0))
    return group


def test_a_group_over_its_time_out_continues_with_its_finished_rollouts(ledger: Ledger, clock: Clock) -> None:
    group = one_unfinished(ledger)
    late = group.rollouts[3]
    gates = Gates()
    gates.rollouts.probe_sent(late.id, 1)
    reconciler = timing_groups(ledger, gates)
    poll(reconciler, clock, 31, running=late.id)
    assert group.state == GroupState.PLAYING
    job = ledger.jobs[late.id]
    poll(reconciler, clock, 1, running=late.id)
    assert job.state is JobState.CANCELLED
    assert (late.state, late.reason) == (RolloutState.FILTERED, "group_timeout")
    assert late.id not in ledger.jobs
    assert group.state == "filter"
    assert len(group.of(RolloutState.GENERATED)) == 3
    assert gates.rollouts.may_send_probe()


def test_a_group_over_its_time_out_is_dropped_with_partial_groups_drop(ledger: Ledger, clock: Clock) -> None:
    group = one_unfinished(ledger)
    poll(timing_groups(ledger, Gates(), partial_groups="drop"), clock, 32, running=group.rollouts[3].id)
    assert group.state == GroupState.CLOSED
    assert ledger.reasons == {"group_timeout": 1, "group_too_small": 3}


def test_a_group_has_no_time_out_with_partial_groups_wait(ledger: Ledger, clock: Clock) -> None:
    group = one_unfinished(ledger)
    poll(timing_groups(ledger, Gates(), partial_groups="wait"), clock, 100, running=group.rollouts[3].id)
    assert group.state == GroupState.PLAYING


def test_time_in_which_no_rollout_of_a_group_can_run_is_not_its_time(ledger: Ledger, clock: Clock) -> None:
    """Its rollout is queued, runs while the engine is away, and is queued again: each longer than the time limit."""
    group, gates = one_unfinished(ledger), Gates()
    late = group.rollouts[3].id
    reconciler = timing_groups(ledger, gates)
    poll(reconciler, clock, 100)
    gates.rollouts.close(Outcome.UNREACHABLE, late, 1, "connection refused")
    poll(reconciler, clock, 100, running=late)
    gates.rollouts.reopen()
    poll(reconciler, clock, 10, running=late)
    poll(reconciler, clock, 100)
    poll(reconciler, clock, 20, running=late)
    assert group.state == GroupState.PLAYING
    poll(reconciler, clock, 1, running=late)
    assert group.state == "filter"


def test_a_running_rollout_that_became_stale_is_cancelled(scene: Scene) -> None:
    """Its version is that of the first poll with its lease; time in the queue does not count."""
    scene.ledger.state.policy_version = 5
    scene.poll(lease="worker:1")
    for version, beat in ((13, 2), (14, 3)):
        assert scene.rollout.state is not RolloutState.FILTERED
        scene.ledger.state.policy_version = version
        scene.poll(lease=f"worker:{beat}")
    assert (scene.rollout.state, scene.rollout.reason) == (RolloutState.FILTERED, "stale")
    assert scene.job.state is JobState.CANCELLED
    assert scene.rollout.id not in scene.ledger.jobs


# Judging is done in slices: other tasks run between two of them.


def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headpond.orchestrator.reconciler.JUDGED_AT_ONCE", 1)


def missing(last_sequence: float = math.inf) -> Snapshot:
    """No job is queued or runs."""
    depths, oldest = dict.fromkeys(Queue, 0), dict[Queue, int | None].fromkeys(Queue)
    return Snapshot(leases={}, depths=depths, oldest=oldest, last_sequence=last_sequence)


def judge_meanwhile(scene: Scene, snapshot: Snapshot, meanwhile: Callable[[], None], *, after: int) -> list[str]:
    """Call `meanwhile` between two slices."""

    async def other() -> None:
        for _ in range(after):
            await asyncio.sleep(0)
        meanwhile()

    async def main() -> list[str]:
        judging = asyncio.create_task(scene.reconciler.judge(snapshot))
        await asyncio.gather(judging, other())
        return judging.result()

    return asyncio.run(main())


def two_jobs_about_to_be_lost(scene: Scene) -> list[JobRecord]:
    later = submitted(scene.ledger, 1)
    jobs = [scene.job, scene.ledger.jobs[later.rollouts[0].id]]
    for _ in range(round(LEASE_S / scene.poll_s) + 1):
        assert [job.losses for job in jobs] == [0, 0]
        judge(scene.reconciler, missing())
        scene.clock.advance(scene.poll_s)
    return jobs


def test_a_job_that_is_settled_between_two_slices_is_not_lost(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    one_at_a_time(monkeypatch)
    first, later = two_jobs_about_to_be_lost(scene)
    judge_meanwhile(scene, missing(), lambda: scene.ledger.end(later, JobState.SETTLED), after=1)
    assert (first.losses, later.losses) == (1, 0)
    assert (first.state, later.state) == (JobState.WAITING, JobState.SETTLED)


def test_a_job_that_is_submitted_again_between_two_slices_is_not_judged_by_its_old_snapshot(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_at_a_time(monkeypatch)
    first, later = two_jobs_about_to_be_lost(scene)

    def submit_again() -> None:
        scene.ledger.retry(later)
        scene.ledger.submit(later)

    snapshot = missing(last_sequence=scene.ledger.state.sequence)
    judge_meanwhile(scene, snapshot, submit_again, after=1)
    assert (first.losses, later.losses, later.attempt) == (1, 0, 2)
    assert later.id not in scene.reconciler._observed  # pyright: ignore[reportPrivateUsage]


def test_a_group_that_is_complete_between_two_slices_is_not_timed_out(
    ledger: Ledger, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_at_a_time(monkeypatch)
    group = one_unfinished(ledger)
    late = group.rollouts[3]
    reconciler = timing_groups(ledger, Gates())
    poll(reconciler, clock, 31, running=late.id)
    clock.advance(reconciler.poll_s)
    snapshot = Snapshot(
        leases={f"{RUN}.{late.id}.1.x": "worker:0"}, depths=dict.fromkeys(Queue, 1), oldest=dict.fromkeys(Queue)
    )

    async def main() -> None:
        judging = asyncio.create_task(reconciler.judge(snapshot))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        ledger.end(ledger.jobs[late.id], JobState.SETTLED)
        ledger.generated(late, RolloutResult(reward=0.0))
        ledger.enter(group, "filter")
        await judging

    asyncio.run(main())
    assert late.state is RolloutState.GENERATED
    assert group.state == "filter"


def test_every_lease_is_read_and_what_they_show_is_counted(ledger: Ledger, tmp_path: Path) -> None:
    config = configured()
    job = submitted(ledger, 1).rollouts[0].id

    async def main(server: EmbeddedRedis) -> None:
        broker = Broker(server.url)
        reconciler = reconciling(config, ledger, broker, Gates())
        leases = {f"other.g0000001-{number}.1.x": "host-7:1" for number in range(3 * LEASES_AT_ONCE)}
        leases[f"{RUN}.{job}.1.x"] = "host-8:1"
        await broker.client.hset(redis_keys.LEASES, mapping=leases)
        snapshot = await reconciler.poll()
        assert snapshot.leases == leases
        assert snapshot.last_sequence == 1
        await reconciler.judge(snapshot)
        assert reconciler.running.by_worker == {"host-7": 3 * LEASES_AT_ONCE, "host-8": 1}
        assert reconciler.running.queues == {Queue.ROLLOUTS}
        await remove_leases(broker, list(leases)[1:])
        assert await read_leases(broker) == {"other.g0000001-0.1.x": "host-7:1"}
        await ledger.committed()
        await broker.close()

    with EmbeddedRedis(tmp_path / "redis") as server:
        asyncio.run(main(server))

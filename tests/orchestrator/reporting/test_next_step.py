import re

from support.ledgers import admitted, configured, pipeline_of, replies_of, submitted

from headpond.ledger.states import JobState
from headpond.orchestrator.exchange.gates import Gates
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.reconciler import Reconciler
from headpond.orchestrator.reporting.next_step import JOBS_SHOWN, NextStep
from headpond.orchestrator.trainer import Trainer
from headpond.records.rollout import RolloutResult


def next_step(ledger: Ledger, *, running: tuple[str, ...] = (), **settings: object) -> NextStep:
    """`running`: jobs that a worker executes."""
    config = configured(**settings)
    gates = Gates()
    pipeline = pipeline_of(config, ledger, gates)
    replies = replies_of(config, ledger, pipeline)
    reconciler = Reconciler(config, "run", ledger, Broker("redis://unused/0"), pipeline, replies, gates)
    reconciler.running.worker_of.update(dict.fromkeys(running, "host-1"))
    return NextStep(config, ledger, Trainer(config, ledger), pipeline, reconciler)


def test_a_group_shows_the_jobs_that_it_waits_for(ledger: Ledger) -> None:
    group = submitted(ledger, JOBS_SHOWN + 2)
    *played, last = group.rollouts
    for rollout in played:
        ledger.end(ledger.jobs[rollout.id], JobState.SETTLED)
        ledger.generated(rollout, RolloutResult(reward=1.0))
    (shown,) = next_step(ledger).status()["groups"]
    assert [job["job"] for job in shown["jobs"]] == [last.id]
    assert shown["rollouts"] == {"generated": JOBS_SHOWN + 1, "submitted": 1}


def test_a_composed_step_shows_its_own_unfinished_jobs(ledger: Ledger) -> None:
    batch = ledger.compose(0, [admitted(ledger), admitted(ledger)])
    for rank in range(2):
        ledger.add_job(batch.job_id(rank), "encode", str(batch.step))
    ledger.end(ledger.jobs[batch.job_id(0)], JobState.SETTLED)
    status = next_step(ledger, batch={"data_ranks": 2}).status()
    assert status["waits_for"] == "encoding"
    assert [job["job"] for job in status["jobs"]] == [batch.job_id(1)]


def test_a_rollout_is_scored_at_its_time_out_and_a_stage_runs_again(ledger: Ledger) -> None:
    rollout = submitted(ledger, 1).rollouts[0]
    (group,) = next_step(ledger, running=(rollout.id,), rollouts={"timeout_s": 5}).status()["groups"]
    assert re.search(
        r"5 s .*\(rollouts\.timeout_s\) .*policy\.policy_error_reward; .*3 more failures or 20 more losses",
        group["jobs"][0]["next"],
    )
    batch = ledger.compose(0, [admitted(ledger)])
    encode = ledger.add_job(batch.job_id(0), "encode", "0")
    ledger.submit(encode)
    (job,) = next_step(ledger, running=(encode.id,)).status()["jobs"]
    assert re.search(r"\(recovery\.stage_timeout_s\) .*3 more failures", job["next"])

"""The run's Prometheus series: from the last status, the ledger's counters and the last step's metrics.

Labels are bounded: states, reasons, queues, kinds of jobs, environments, and at most PROCESSES_MOST processes.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headpond.event_loop.lag_summaries import LagSummary
from headpond.ledger.state_rows import RunState
from headpond.ledger.states import RolloutState
from headpond.records.status import Status

if TYPE_CHECKING:
    from headpond.orchestrator.components import Components

PROCESSES_MOST = 64  # those with the worst lag
QUANTILES = {"0.5": "median_s", "0.9": "p90_s", "0.99": "p99_s", "1": "max_s"}
LAST_STEP = {
    "reward_mean": "reward_mean",
    "played_reward_mean": "played_reward_mean",
    "staleness_mean": "staleness_mean",
    "staleness_max": "staleness_max",
    "replaced_share": "replaced_share",
    "seconds": "time/step_s",
    "composed_to_sealed_seconds": "time/composed_to_sealed_s",
}  # series -> key of metrics.jsonl
# keys of evaluations.jsonl
EVALUATED = ("reward_mean", "solved_rate", "version", "version_first", "version_last", "dead", "duration_s")

LOADS = {
    "running": "Requests that the replica runs.",
    "waiting": "Requests in the replica's queue.",
    "cache_use": "Used share of the replica's KV cache.",
}
USES = {
    "tokens": "Tokens that were used.",
    "seconds": "Duration of answered requests.",
    "lost_tokens": "Tokens thrown away, or computed again, because the replica failed.",
}
Labelled = Iterable[tuple[str, float]]


class RunCollector(Collector):
    def __init__(self, run: "Components") -> None:
        self._run = run

    def collect(self) -> Iterator[Metric]:
        run = self._run
        status, counts, last = run.reporter.latest_status(), run.ledger.state, run.metrics.last
        yield GaugeMetricFamily(
            "headpond_policy_version", "Newest policy version that the trainer published.", status.policy_version
        )
        yield GaugeMetricFamily("headpond_steps_wanted", "Steps after which the run ends.", status.steps)
        yield CounterMetricFamily("headpond_steps", "Delivered steps.", status.step)
        yield from _rollouts(run.ledger.states, counts)
        yield from _jobs(status, counts)
        yield from _rates(status)
        yield from _replicas(status.replicas, counts)
        yield from _evaluations(status.evaluations)
        yield from _lags([run.lag.summary(), *run.lags.others])
        for name, key in LAST_STEP.items():
            if key in last:
                yield GaugeMetricFamily(f"headpond_last_step_{name}", f"`{key}` of the last delivered step.", last[key])


def _rollouts(states: Mapping[str, int], counts: RunState) -> Iterator[Metric]:
    in_state = [(state.value, states.get(state, 0)) for state in RolloutState]
    yield _gauges("headpond_rollouts", "Rollouts by state; the sum is all planned rollouts.", "state", in_state)
    reasons = counts.rollout_counts["reasons"].by_name.items()
    yield _counters("headpond_rollouts_filtered", "Dropped rollouts.", "reason", reasons)
    yield CounterMetricFamily("headpond_rollouts_generated", "Generated rollouts.", counts.rollouts_generated)
    yield CounterMetricFamily("headpond_rollouts_fenced", "Late replies, not counted.", counts.fenced)
    yield CounterMetricFamily(
        "headpond_replies_refused", "Replies that named files of other jobs.", counts.replies_refused
    )
    yield CounterMetricFamily("headpond_tokens_generated", "Completion tokens.", counts.tokens_generated)
    yield CounterMetricFamily("headpond_groups_dropped", "Dropped groups, which were replaced.", counts.groups_dropped)
    solved = CounterMetricFamily("headpond_groups", "Completed groups.", labels=["environment", "solved"])
    for environment, row in counts.environments.items():
        for how, number in row.solved.items():
            solved.add_metric([environment, how], number)
    yield solved


def _jobs(status: Status, counts: RunState) -> Iterator[Metric]:
    yield _gauges("headpond_queue_depth", "Messages that no worker has taken yet.", "queue", status.queued.items())
    waiting, submitted = status.waiting_jobs.items(), status.submitted_jobs.items()
    yield _gauges("headpond_jobs_waiting", "Jobs to be submitted.", "queue", waiting)
    yield _gauges("headpond_jobs_submitted", "Jobs without a reply.", "queue", submitted)
    running = status.running_by_worker
    yield GaugeMetricFamily("headpond_jobs_running", "Executions that hold a lease.", sum(running.values()))
    yield GaugeMetricFamily("headpond_workers_busy", "Worker processes that run a job.", len(running))
    stages = counts.stages.items()
    yield _counters("headpond_jobs", "Settled jobs.", "kind", [(name, row.settled) for name, row in stages])
    seconds = [(name, row.seconds) for name, row in stages]
    yield _counters("headpond_job_seconds", "Duration of settled jobs.", "kind", seconds)


def _replicas(replicas: Mapping[str, Any], counts: RunState) -> Iterator[Metric]:
    serve = [(url, float(each["serves"])) for url, each in replicas.items()]
    yield _gauges("headpond_replica_serves", "Whether the replica has weights that may serve.", "replica", serve)
    for name, what in LOADS.items():
        loads = [(url, each[name]) for url, each in replicas.items() if name in each]
        yield _gauges(f"headpond_replica_{name}", what, "replica", loads)
    for field, what in USES.items():
        uses = [(url, getattr(row, field)) for url, row in counts.replicas.items()]
        yield _counters(f"headpond_replica_{field}", what, "replica", uses)


def _evaluations(status: Mapping[str, Any]) -> Iterator[Metric]:
    if not status:
        return
    counts = [(state, n) for state, n in status["rollouts"].items() if state not in ("planned", "balanced")]
    yield _gauges("headpond_evaluation_rollouts", "Rollouts of evaluations by state.", "state", counts)
    last = {name: each["last"] for name, each in status["names"].items() if each["last"]}
    for key in EVALUATED:
        found = [(name, values[key]) for name, values in last.items() if key in values]
        yield _gauges(f"headpond_evaluation_{key}", f"`{key}` of the last evaluation.", "evaluation", found)


def _rates(status: Status) -> Iterator[Metric]:
    over = "over the last ten seconds."
    yield GaugeMetricFamily("headpond_rollouts_per_second", f"Generated, {over}", status.rollouts_per_s)
    yield GaugeMetricFamily("headpond_tokens_per_second", f"Completion tokens, {over}", status.tokens_per_s)
    yield GaugeMetricFamily("headpond_waiting_for", "Reasons why the run waits.", len(status.waiting_for))


def _lags(lags: list[LagSummary]) -> Iterator[Metric]:
    lag_s = GaugeMetricFamily(
        "headpond_event_loop_lag_seconds", "Event loop lag in the last window.", labels=["process", "quantile"]
    )
    blocked_s = GaugeMetricFamily(
        "headpond_event_loop_blocked_seconds", "Time the loop was blocked in the last window.", labels=["process"]
    )
    for lag in sorted(lags, key=lambda lag: -lag.p99_s)[:PROCESSES_MOST]:
        blocked_s.add_metric([lag.process], lag.blocked_s)
        for quantile, name in QUANTILES.items():
            lag_s.add_metric([lag.process, quantile], getattr(lag, name))
    yield lag_s
    yield blocked_s


def _gauges(name: str, what: str, label: str, values: Labelled) -> Metric:
    return _with_samples(GaugeMetricFamily(name, what, labels=[label]), values)


def _counters(name: str, what: str, label: str, values: Labelled) -> Metric:
    return _with_samples(CounterMetricFamily(name, what, labels=[label]), values)


def _with_samples(family: GaugeMetricFamily | CounterMetricFamily, values: Labelled) -> Metric:
    for label, number in values:
        family.add_metric([label], number)
    return family

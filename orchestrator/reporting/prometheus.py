"""What Prometheus is told: a few dozen series, from the last status, the ledger's counters and the last step's metrics.

Labels are bounded: states, reasons, queues, kinds of jobs, environments, and at most PROCESSES_MOST processes.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from orchestrator.reporting.metrics import counters
from penstock.ledger.states import RolloutState
from penstock.runtime.loop_lag import LagSummary

if TYPE_CHECKING:
    from orchestrator.loop import Orchestrator

PROCESSES_MOST = 64  # those with the worst lag
QUANTILES = {"0.5": "median_s", "0.9": "p90_s", "0.99": "p99_s", "1": "max_s"}
LAST_STEP = {
    "reward_mean": "reward_mean",
    "staleness_mean": "staleness_mean",
    "staleness_max": "staleness_max",
    "replaced_share": "replaced_share",
    "seconds": "time/step_s",
    "composed_to_sealed_seconds": "time/composed_to_sealed_s",
}
"""series -> key of metrics.jsonl"""

Labelled = Iterable[tuple[str, float]]


class RunCollector(Collector):
    def __init__(self, orchestrator: "Orchestrator") -> None:
        self._own = orchestrator

    def collect(self) -> Iterator[Metric]:
        own = self._own
        status = own.reporter.latest or own.reporter.status()
        counts = counters(own.ledger)
        yield GaugeMetricFamily(
            "penstock_policy_version", "Newest that the trainer published.", status["policy_version"]
        )
        yield GaugeMetricFamily("penstock_steps_wanted", "Steps after which the run ends.", own.config.steps)
        yield CounterMetricFamily("penstock_steps", "Delivered steps.", own.ledger.number("steps_delivered"))
        yield from _rollouts(own.ledger.states, counts)
        yield from _jobs(status, counts)
        yield from _speed(status)
        yield from _lags([own.lag.summary(), *own.lags.others])
        for name, key in LAST_STEP.items():
            if key in own.metrics.last:
                what = f"`{key}` of the last delivered step."
                yield GaugeMetricFamily(f"penstock_last_step_{name}", what, own.metrics.last[key])


def _rollouts(states: Mapping[RolloutState, int], counts: Mapping[str, float]) -> Iterator[Metric]:
    in_state = [(state.value, states.get(state, 0)) for state in RolloutState]
    yield _gauges("penstock_rollouts", "Rollouts by state; all of them together were planned.", "state", in_state)
    filtered = _under(counts, "filtered:")
    yield _counters("penstock_rollouts_filtered", "Rollouts that were dropped.", "reason", filtered)
    yield CounterMetricFamily("penstock_rollouts_generated", "Rollouts that came back.", counts["generated"])
    yield CounterMetricFamily("penstock_rollouts_fenced", "Late answers, not counted.", counts["fenced"])
    yield CounterMetricFamily("penstock_tokens_generated", "Completion tokens.", counts["tokens_generated"])
    yield CounterMetricFamily("penstock_groups_dropped", "Groups that were replaced.", counts["groups_dropped"])
    solved = CounterMetricFamily("penstock_groups", "Completed groups.", labels=["environment", "solved"])
    for name, number in _under(counts, "solved_"):
        how, _, environment = name.partition(":")
        solved.add_metric([environment, how], number)
    yield solved


def _jobs(status: Mapping[str, Any], counts: Mapping[str, float]) -> Iterator[Metric]:
    yield _gauges("penstock_queue_depth", "Messages that no worker has taken.", "queue", status["queued"].items())
    waiting, submitted = status["waiting_jobs"].items(), status["submitted_jobs"].items()
    yield _gauges("penstock_jobs_waiting", "Jobs to be submitted.", "queue", waiting)
    yield _gauges("penstock_jobs_submitted", "Jobs without an answer.", "queue", submitted)
    running = status["running_by_worker"]
    yield GaugeMetricFamily("penstock_jobs_running", "Executions that hold a lease.", sum(running.values()))
    yield GaugeMetricFamily("penstock_workers_busy", "Worker processes that run something.", len(running))
    yield _counters("penstock_jobs", "Jobs that were answered.", "kind", _under(counts, "settled:"))
    yield _counters("penstock_job_seconds", "What answered jobs took.", "kind", _under(counts, "seconds:"))


def _speed(status: Mapping[str, Any]) -> Iterator[Metric]:
    over = "over the last ten seconds."
    yield GaugeMetricFamily("penstock_rollouts_per_second", f"Generated, {over}", status["rollouts_per_s"])
    yield GaugeMetricFamily("penstock_tokens_per_second", f"Completion tokens, {over}", status["tokens_per_s"])
    yield GaugeMetricFamily("penstock_waiting_for", "Reasons why the run waits.", len(status["waiting_for"]))


def _lags(lags: list[LagSummary]) -> Iterator[Metric]:
    lag_s = GaugeMetricFamily("penstock_event_loop_lag_seconds", "Of the last window.", labels=["process", "quantile"])
    blocked_s = GaugeMetricFamily("penstock_event_loop_blocked_seconds", "Of the last window.", labels=["process"])
    for lag in sorted(lags, key=lambda lag: -lag.p99_s)[:PROCESSES_MOST]:
        blocked_s.add_metric([lag.process], lag.blocked_s)
        for quantile, name in QUANTILES.items():
            lag_s.add_metric([lag.process, quantile], getattr(lag, name))
    yield lag_s
    yield blocked_s


def _gauges(name: str, what: str, label: str, values: Labelled) -> Metric:
    family = GaugeMetricFamily(name, what, labels=[label])
    for value, number in values:
        family.add_metric([value], number)
    return family


def _counters(name: str, what: str, label: str, values: Labelled) -> Metric:
    family = CounterMetricFamily(name, what, labels=[label])
    for value, number in values:
        family.add_metric([value], number)
    return family


def _under(counts: Mapping[str, float], prefix: str) -> Labelled:
    return [(key.removeprefix(prefix), number) for key, number in counts.items() if key.startswith(prefix)]

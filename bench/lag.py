"""`python -m bench lag`: lag and memory of the orchestrator's loop with steps of 256 rollouts, at 1x and 10x the bytes.

Two pipelines alternate; they differ only in the layers of routed experts that the engine sends with every token. For
each step, the lag in the orchestrator's metrics is compared with that of an idle loop (the canary) over the same time.
"""

from dataclasses import dataclass

from bench.harness.canary import Canary
from bench.harness.pipeline import Load, Pipeline, start_pipeline
from bench.harness.procfs import queued_s, resident_mb
from bench.harness.progress import Show, progress
from bench.harness.report import Report, Target, median

ROUNDS = 5
ABOVE_CANARY_MS = 5.0
NOISE_MS = 5.0
"""The p99 of two idle loops differs by up to 14 ms in one step here, in the median over rounds by less than this."""
RESIDENT_MB = 200.0
GROWTH_MB = 2.0
"""per step; 60 MB if the columns of every rollout were kept"""


@dataclass(frozen=True, kw_only=True)
class Size:
    few: Load
    many: Load
    """the same load with ten times the bytes"""


# 12 turns, 4,800 tokens: 16 or 160 MB of bodies per rollout, since each body has the rows of all previous tokens.
FULL = Size(
    few=Load(steps=3, step_rollouts=256, turns=12, user_tokens=300, completion_tokens=100, layers=48),
    many=Load(steps=2, step_rollouts=256, turns=12, user_tokens=300, completion_tokens=100, layers=480),
)
QUICK = Size(
    few=Load(steps=2, step_rollouts=16, turns=2, user_tokens=200, completion_tokens=50, layers=4),
    many=Load(steps=2, step_rollouts=16, turns=2, user_tokens=200, completion_tokens=50, layers=48),
)


@dataclass(frozen=True, kw_only=True)
class Step:
    received_gb: float
    seconds: float
    lag_p99_ms: float
    lag_max_ms: float
    cpu_share: float
    """share of a core used by the loop's thread"""
    queued_share: float
    """share of the time in which that thread was runnable without a core"""
    canary_p99_ms: float
    canary_queued_share: float
    resident_mb: float
    """of the orchestrator when the step was delivered"""

    @property
    def above_canary_ms(self) -> float:
        return self.lag_p99_ms - self.canary_p99_ms


@dataclass(frozen=True, kw_only=True)
class Round:
    steps: list[Step]
    peak_mb: float

    @property
    def growth_mb(self) -> float:
        """Per step, after the first, in which memory is touched for the first time."""
        return (self.steps[-1].resident_mb - self.steps[0].resident_mb) / max(1, len(self.steps) - 1)


def run(*, quick: bool) -> Report:
    return measure(QUICK, rounds=1, quick=True) if quick else measure(FULL, rounds=ROUNDS)


def measure(size: Size, *, rounds: int, quick: bool = False) -> Report:
    few: list[Round] = []
    many: list[Round] = []
    with progress("lag") as show, Canary() as canary:
        show("starting two pipelines")
        with start_pipeline(size.few) as narrow, start_pipeline(size.many) as wide:
            for number in range(1, rounds + 1):
                for pipe, done, name in ((narrow, few, "1x"), (wide, many, "10x")):
                    here = f"round {number} of {rounds}, {name} the bytes"
                    done.append(_round(pipe, canary, lambda text, here=here: show(f"{here}: {text}")))
    return _report(few, many, quick=quick)


class Meter:
    """Readings of one step: differences since the previous reading."""

    def __init__(self, pipe: Pipeline, canary: Canary, orchestrator: int) -> None:
        self._pipe, self._canary, self._orchestrator = pipe, canary, orchestrator
        self._begin()

    def _begin(self) -> None:
        self._before = self._now()
        self._canary.begin()

    def _now(self) -> tuple[int, float, float]:
        return self._pipe.received_bytes(), queued_s(self._orchestrator), queued_s(self._canary.pid)

    def read(self, line: dict[str, float]) -> Step:
        """Read at the end of a step; `line` is the step's line of metrics.jsonl."""
        lag = self._canary.end()
        received, queued, canary_queued = (now - then for now, then in zip(self._now(), self._before, strict=True))
        self._begin()
        return Step(
            received_gb=received / 1e9,
            seconds=line["time/step_s"],
            lag_p99_ms=1000 * line["event_loop_lag/p99"],
            lag_max_ms=1000 * line["event_loop_lag/max"],
            cpu_share=line["event_loop_lag/cpu_share"],
            queued_share=queued / lag.window_s,
            canary_p99_ms=1000 * lag.p99_s,
            canary_queued_share=canary_queued / lag.window_s,
            resident_mb=resident_mb(self._orchestrator),
        )


def _round(pipe: Pipeline, canary: Canary, show: Show) -> Round:
    show("starting the orchestrator")
    steps: list[Step] = []
    peak_mb = 0.0
    with pipe.running() as run:

        def sample_memory() -> None:
            nonlocal peak_mb
            peak_mb = max(peak_mb, resident_mb(run.process.pid))
            show(f"{len(steps)} of {pipe.load.steps} steps")

        meter = Meter(pipe, canary, run.process.pid)
        steps += (meter.read(line) for line in pipe.steps(run, sample_memory))
        canary.end()
    return Round(steps=steps, peak_mb=peak_mb)


def _report(few: list[Round], many: list[Round], *, quick: bool) -> Report:
    figures = {**_figures("1x", few), **_figures("10x", many)}
    above = {name: figures[f"{name}: orchestrator's p99 above canary's, ms"] for name in ("1x", "10x")}
    peak_mb = max(each.peak_mb for each in [*few, *many])
    targets = [
        *(Target(name=f"{name}: p99 above canary's, ms", value=above[name], limit=ABOVE_CANARY_MS) for name in above),
        Target(name="p99 above canary's, 10x - 1x, ms", value=above["10x"] - above["1x"], limit=NOISE_MS),
        Target(name="orchestrator's memory, MB, most", value=peak_mb, limit=RESIDENT_MB),
        *(
            Target(name=f"{name}: MB more a step", value=figures[f"{name}: MB more a step"], limit=GROWTH_MB)
            for name in above
        ),
    ]
    return Report(bench="lag", figures=figures, targets=targets, rounds=len(few), quick=quick)


def _figures(name: str, rounds: list[Round]) -> dict[str, float]:
    steps = [step for each in rounds for step in each.steps]
    figures = {
        "GB received a step": sum(step.received_gb for step in steps) / len(steps),
        "s a step": median([step.seconds for step in steps]),
        "orchestrator's lag p99, ms": median([step.lag_p99_ms for step in steps]),
        "canary's lag p99, ms": median([step.canary_p99_ms for step in steps]),
        "orchestrator's p99 above canary's, ms": median([step.above_canary_ms for step in steps]),
        "orchestrator's lag max, ms": median([step.lag_max_ms for step in steps]),
        "loop's share of a core": median([step.cpu_share for step in steps]),
        "loop had no core, share of the time": median([step.queued_share for step in steps]),
        "canary had no core, share of the time": median([step.canary_queued_share for step in steps]),
        "orchestrator's memory, MB": median([each.peak_mb for each in rounds]),
        "MB more a step": median([each.growth_mb for each in rounds]),
    }
    return {f"{name}: {what}": value for what, value in figures.items()}

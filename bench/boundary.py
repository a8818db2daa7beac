"""`python -m bench boundary`: time from the last admitted rollout to the sealed manifest.

Two pipelines, with and without routed experts, alternate with one step per run, so that no other rollout is in flight.
The orchestrator measures the time: from composing the batch, in the loop iteration after its last rollout is admitted,
until the manifest is on disk.
"""

from dataclasses import dataclass, replace

from bench.harness.pipeline import Load, Pipeline, start_pipeline
from bench.harness.progress import Show, progress
from bench.harness.report import Report, Target, median
from headpond.batches import read_manifest
from headpond.store import open_store

ROUNDS = 15
"""A boundary takes 0.15 s, at times 0.4 s on a busy machine: medians of fewer rounds differ by a third."""
LAYERS = 48
RATIO = 1.2


@dataclass(frozen=True, kw_only=True)
class Size:
    step: Load
    """with routed experts"""

    @property
    def bare(self) -> Load:
        return replace(self.step, layers=0)


# 32 rollouts of 43,000 tokens, half of them sampled: 530 MB of routed experts. In 2 turns their bodies are 1.1 GB, in
# 8 turns 3.2 GB; the boundary does not depend on it.
FULL = Size(step=Load(steps=1, step_rollouts=32, turns=2, user_tokens=10_750, completion_tokens=10_750, layers=LAYERS))
QUICK = Size(step=Load(steps=1, step_rollouts=16, turns=2, user_tokens=100, completion_tokens=100, layers=LAYERS))


@dataclass(frozen=True, kw_only=True)
class Sealed:
    boundary_s: float
    encoding_s: float
    """the part of the boundary spent in the encoding job"""
    tokens: float
    rank_mb: float
    experts_mb: float


def run(*, quick: bool) -> Report:
    size, rounds = (QUICK, 1) if quick else (FULL, ROUNDS)
    routed: list[Sealed] = []
    bare: list[Sealed] = []
    with progress("boundary") as show:
        show("starting two pipelines")
        with start_pipeline(size.step) as with_routes, start_pipeline(size.bare) as without:
            for number in range(1, rounds + 1):
                for pipe, done, name in ((with_routes, routed, "with"), (without, bare, "without")):
                    here = f"round {number} of {rounds}, {name} routed experts"
                    done.append(_seal(pipe, lambda text, here=here: show(f"{here}: {text}")))
    return _report(routed, bare, quick=quick)


def _seal(pipe: Pipeline, show: Show) -> Sealed:
    with pipe.running() as run:
        [line] = pipe.steps(run, lambda: show(f"{run.status().rollouts['in_flight']} rollouts in flight"))
    manifest = read_manifest(open_store(pipe.cluster.store), 0)
    assert manifest is not None
    experts = [rollout.experts.size for rollout in manifest.plan.rollouts if rollout.experts]
    return Sealed(
        boundary_s=line["time/composed_to_sealed_s"],
        encoding_s=line["time/encode_max_s"],
        tokens=line["tokens"],
        rank_mb=sum(rank.file.size for rank in manifest.ranks) / 1e6,
        experts_mb=sum(experts) / 1e6,
    )


def _report(routed: list[Sealed], bare: list[Sealed], *, quick: bool) -> Report:
    figures = {**_figures("with", routed), **_figures("without", bare)}
    ratio = figures["with: last admitted to sealed, s"] / figures["without: last admitted to sealed, s"]
    by_round = [one.boundary_s / other.boundary_s for one, other in zip(routed, bare, strict=True)]
    figures |= {"with / without, median of rounds": median(by_round)}
    target = Target(name="boundary with routed experts / without, of medians", value=ratio, limit=RATIO)
    return Report(bench="boundary", figures=figures, targets=[target], rounds=len(routed), quick=quick)


def _figures(name: str, rounds: list[Sealed]) -> dict[str, float]:
    figures = {
        "last admitted to sealed, s": median([each.boundary_s for each in rounds]),
        "last admitted to sealed, s, least": min(each.boundary_s for each in rounds),
        "last admitted to sealed, s, most": max(each.boundary_s for each in rounds),
        "of which the encoding job, s": median([each.encoding_s for each in rounds]),
        "tokens": rounds[0].tokens,
        "rank files, MB": rounds[0].rank_mb,
        "routed experts, MB": rounds[0].experts_mb,
    }
    return {f"{name}: {what}": value for what, value in figures.items()}

"""`penstock bench boundary`: from the last rollout admitted to the manifest sealed, with routed experts and without.

Two whole pipes take turns, one step a run, so that nothing else is on its way meanwhile; the steps are the same but for
the routed experts. The time is the orchestrator's own: a batch is composed in the turn of its loop that follows the
admission of its last rollout, and measured when its manifest is on the disk.
"""

from dataclasses import dataclass, replace

from bench.pipeline import Load, Pipeline, pipeline
from bench.progress import Say, progress
from bench.report import Report, Target, median
from penstock.batches import read_manifest
from penstock.store import open_store

ROUNDS = 15
"""A boundary takes 0.15 s, of which a busy machine makes 0.4 at times: medians of fewer rounds differ by a third."""
LAYERS = 48
RATIO = 1.2


@dataclass(frozen=True, kw_only=True)
class Size:
    step: Load
    """with routed experts"""

    @property
    def bare(self) -> Load:
        return replace(self.step, layers=0)


# 32 rollouts of 43,000 tokens, half of them sampled: 530 MB of routed experts. In 8 turns 3.2 GB of bodies would bring
# the same rows; in 2 turns it is 1.1 GB, and the boundary sees no difference.
FULL = Size(step=Load(steps=1, step_rollouts=32, turns=2, said=10_750, answered=10_750, layers=LAYERS))
QUICK = Size(step=Load(steps=1, step_rollouts=16, turns=2, said=100, answered=100, layers=LAYERS))


@dataclass(frozen=True, kw_only=True)
class Sealed:
    boundary_s: float
    encoding_s: float
    """of the boundary, in the encoding job itself"""
    tokens: float
    rank_mb: float
    experts_mb: float


def run(*, quick: bool) -> Report:
    size, rounds = (QUICK, 1) if quick else (FULL, ROUNDS)
    routed: list[Sealed] = []
    bare: list[Sealed] = []
    with progress("boundary") as say:
        say("starting two pipes")
        with pipeline(size.step) as with_routes, pipeline(size.bare) as without:
            for number in range(1, rounds + 1):
                for pipe, done, name in ((with_routes, routed, "with"), (without, bare, "without")):
                    here = f"round {number} of {rounds}, {name} routed experts"
                    done.append(_seal(pipe, lambda text, here=here: say(f"{here}: {text}")))
    return _report(routed, bare, quick=quick)


def _seal(pipe: Pipeline, say: Say) -> Sealed:
    with pipe.running() as run:
        [line] = pipe.steps(run, lambda: say(f"{run.status()['rollouts']['in_flight']} rollouts on their way"))
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

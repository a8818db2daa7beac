"""`headpond redo RUN_DIR`: recorded rollouts through other filters, estimators, shaping and packing."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headpond.commands.facts import Fact
from headpond.commands.output import Json, print_result
from headpond.commands.status import RunDir

if TYPE_CHECKING:
    from headpond.commands.redone import Redone, RedoneStep

# Rollouts that differ, in the table. JSON has all.
SHOWN = 20


def redo(
    run_dir: RunDir,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="SETTING=VALUE", help="E.g. advantages.estimator=rloo.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="One step. Default: all whose token columns are kept.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw the advantages before and now.")] = None,
    as_json: Json = False,
) -> None:
    """Compute recorded steps again, with other filters, estimators or packing.

    Shows what would be kept, the advantages side by side, and why each differs. Nothing is played again and the run is
    only read: works on steps whose token columns are kept (trainer.keep_steps).
    """
    from headpond.commands.redone import Redo

    redo = Redo(run_dir, settings or [])
    steps = [redo.step(number) for number in ([step] if step is not None else redo.steps())]
    if plot:
        _draw(steps, plot)
    content = {"changes": redo.changes, "steps": [asdict(each) for each in steps]}
    print_result(content, _facts(steps), as_json=as_json)


def _facts(steps: "list[RedoneStep]") -> Iterator[Fact]:
    if not steps:
        yield Fact("steps", "none whose token columns are kept: raise trainer.keep_steps")
    for each in steps:
        differing = [one for one in each.rollouts if one.why]
        same = "the same bytes" if each.same_bytes else f"{len(differing):,} of {len(each.rollouts):,} rollouts differ"
        yield Fact(f"step {each.step}", same)
        for name, was, now in (
            ("kept", each.was.rollouts, each.now.rollouts),
            ("loss tokens", each.was.loss_tokens, each.now.loss_tokens),
            ("batches", each.was.micro_batches, each.now.micro_batches),
        ):
            yield Fact(name, f"{was:,}" if was == now else f"{was:,} before, {now:,} now")
        for one in differing[:SHOWN]:
            yield Fact("", _line(one))
        if len(differing) > SHOWN:
            yield Fact("", f"and {len(differing) - SHOWN:,} more (--json)")


def _line(one: "Redone") -> str:
    was, now = (
        verdict.dropped or ("none" if verdict.advantage is None else f"{verdict.advantage:+.4f}")
        for verdict in (one.was, one.now)
    )
    return f"{one.rollout}  reward {one.reward:.4g}: {was} -> {now} ({one.why})"


def _draw(steps: "list[RedoneStep]", path: Path) -> None:
    from headpond.commands.plots import scatter

    points = [
        (one.was.advantage, one.now.advantage)
        for each in steps
        for one in each.rollouts
        if one.was.advantage is not None and one.now.advantage is not None and not one.now.dropped
    ]
    path.write_text(scatter("Advantages of kept rollouts", points, x="before", y="now"))

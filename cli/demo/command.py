"""`penstock demo`: its options, how it is shown, its exit code."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.output import LOG_FORMAT, Json, on_terminal, print_facts, print_json

if TYPE_CHECKING:
    from cli.demo.course import Course
    from cli.demo.options import Options
    from cli.demo.progress import Progress

STEPS = 10
SECONDS = 40.0  # for the default steps, on a machine that is slow or busy


def demo(
    steps: Annotated[
        int | None, typer.Option(min=1, help=f"Default: {STEPS}, or as many as {SECONDS:.0f} s allow.")
    ] = None,
    rollouts_per_step: Annotated[int, typer.Option(min=8, help="A multiple of 8, the size of a group.")] = 48,
    routed_experts: Annotated[str, typer.Option(metavar="LAYERSxTOPK", help="Or off.")] = "8x8",
    run_dir: Annotated[
        Path | None, typer.Option(help="New or empty. Default: runs/demo-N, the next one.", show_default=False)
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Release no rollout's files, and keep those of Redis.")] = False,
    as_json: Json = False,
) -> None:
    """Watch rollouts become batches: all of Penstock on this machine.

    Starts Redis, an inference server without a model, a session server, two workers, the orchestrator and a trainer,
    on free ports; plays four environments, filters, forms and trains steps; sums up, and ends every process.
    Ctrl-C once sums up what is there, twice stops now.
    """
    from cli.demo.options import Options, Routes, make_run_dir, write_configuration

    options = Options(
        routes=Routes.parse(routed_experts),
        rollouts_per_step=rollouts_per_step,
        steps=steps or STEPS,
        seconds=None if steps else SECONDS,
        keep=keep,
        run_dir=make_run_dir(run_dir),
    )
    write_configuration(options)
    _play(options, as_json=as_json)


def _play(options: "Options", *, as_json: bool) -> None:
    from cli.demo.options import short

    # Before anything that takes long to import.
    parts = "Redis, an engine, a session server, two workers, an orchestrator and a trainer"
    print(f"penstock demo: starting {parts} in {short(options.run_dir)}", file=sys.stderr, flush=True)
    from cli.demo.course import Course, Interrupts

    interrupts = Interrupts()
    course = Course(options, interrupts)
    with _shown(course.progress, live=on_terminal() and not as_json) as watch:
        course.run(watch)
    if course.progress.status:
        _sum_up(options, course, as_json=as_json)
    if interrupts.signals:
        raise typer.Exit(128 + interrupts.signals[0])


def _sum_up(options: "Options", course: "Course", *, as_json: bool) -> None:
    from cli.demo.summary import collect, show

    found = collect(options, course)
    if as_json:
        print_json(found)
    else:
        print_facts(show(options, found))
    if not found["audit"]["balanced"]:
        raise typer.Exit(1)


@contextmanager
def _shown(progress: "Progress", *, live: bool) -> Iterator[Callable[[Any], None]]:
    if live:
        from cli.live import LiveView

        with LiveView(beside=progress.beside) as view:
            yield view.watch
    else:
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
        yield lambda status: None

"""`headpond demo`: options, output and exit code."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headpond.commands.output import Json, print_facts, print_json, showing_run

if TYPE_CHECKING:
    from headpond.commands.demo.lifecycle import Demo
    from headpond.commands.demo.options import Options

STEPS = 24
SECONDS = 120.0  # time limit of the default steps, for slow or busy machines


def demo(
    steps: Annotated[
        int | None, typer.Option(min=1, help=f"Number of steps. Default: {STEPS}, or fewer after {SECONDS:.0f} s.")
    ] = None,
    rollouts_per_step: Annotated[int, typer.Option(min=8, help="Must be a multiple of 8, the group size.")] = 96,
    seed: Annotated[int, typer.Option(min=0, help="Of the model's first weights and of all that is sampled.")] = 0,
    run_dir: Annotated[
        Path | None, typer.Option(help="A new or empty directory. Default: the next runs/demo-N.", show_default=False)
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the files of Redis and of trained rollouts.")] = False,
    as_json: Json = False,
) -> None:
    """Run all of Headpond on this machine, without a GPU.

    Starts Redis, an inference server with a small mixture of experts, a session server, two workers, the orchestrator
    and a trainer on free ports. The model learns three tasks: it is trained on every step, and its new weights are
    loaded into the server. Draws its reward, prints a summary and ends every process. Ctrl-C stops and prints the
    summary; Ctrl-C twice stops at once.
    """
    from headpond.commands.demo.options import Options, checked_rollouts_per_step, make_run_dir, write_configuration

    options = Options(
        seed=seed,
        rollouts_per_step=checked_rollouts_per_step(rollouts_per_step),
        steps=steps or STEPS,
        seconds=None if steps else SECONDS,
        keep=keep,
        run_dir=make_run_dir(run_dir),  # last: a wrong option leaves no directory behind
    )
    write_configuration(options)
    _run(options, as_json=as_json)


def _run(options: "Options", *, as_json: bool) -> None:
    from headpond.commands.demo.options import short

    # Printed before the slow imports.
    parts = "Redis, an engine, a session server, two workers, an orchestrator and a trainer"
    print(f"headpond demo: starting {parts} in {short(options.run_dir)}", file=sys.stderr, flush=True)
    from headpond.commands.demo.lifecycle import Demo
    from headpond.commands.interrupts import Interrupts

    interrupts = Interrupts()
    demo = Demo(options, interrupts)
    with showing_run(as_json=as_json, more_facts=demo.progress.facts) as on_status:
        demo.run(on_status)
    if demo.progress.status:
        _print_summary(options, demo, as_json=as_json)
    if interrupts.signals:
        raise typer.Exit(128 + interrupts.signals[0])


def _print_summary(options: "Options", demo: "Demo", *, as_json: bool) -> None:
    from headpond.commands.demo.summary import collect, summary_facts

    summary = collect(options, demo)
    if as_json:
        print_json(summary)
    else:
        print_facts(summary_facts(options, summary))
    if not summary["audit"]["balanced"]:
        raise typer.Exit(1)

"""`headpond demo`: `headpond up` with the demo's configuration, and a summary at the end."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from headpond.commands.output import Json, print_end, showing_run

STEPS = 24
SECONDS = 120.0  # time limit of the default steps, for slow or busy machines
GROUP_SIZE = 8  # of examples/demo.toml
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # the model's products are small: threads would only spin


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

    Starts Redis, an inference server with a small mixture of experts, a session server, two workers, the orchestrator,
    a trainer and the dashboard on free ports. The model learns three tasks: it is trained on every step, and its new
    weights are loaded into the server. Draws its reward, prints a summary and ends every process. Ctrl-C stops and
    prints the summary; Ctrl-C twice stops at once.
    """
    from headpond.commands.demo_directory import make_run_dir, write_configuration
    from headpond.errors import ConfigError

    groups, rest = divmod(rollouts_per_step, GROUP_SIZE)
    if rest:
        raise ConfigError(f"--rollouts-per-step {rollouts_per_step}: must be a multiple of {GROUP_SIZE}")
    directory = make_run_dir(run_dir)  # last: a wrong option leaves no directory behind
    config = write_configuration(directory, steps=steps or STEPS, groups=groups, seed=seed, keep=keep)
    _run(config, limit_s=None if steps else SECONDS, keep=keep, as_json=as_json)


def _run(config: Path, *, limit_s: float | None, keep: bool, as_json: bool) -> None:
    from headpond.commands.demo_directory import short

    # Printed before the slow imports.
    parts = "Redis, an engine, a session server, two workers, an orchestrator, a trainer and a dashboard"
    print(f"headpond demo: starting {parts} in {short(config.parent)}", file=sys.stderr, flush=True)
    from headpond import config as configuration
    from headpond.commands.demo_summary import collect, reward_facts, summary_facts
    from headpond.commands.interrupts import Interrupts
    from headpond.commands.launcher.local_run import LocalRun
    from headpond.processes.privacy import inherited_variables

    settings = configuration.load(config, environ={})
    interrupts = Interrupts()
    run = LocalRun(
        settings, interrupts, config=config, environment=inherited_variables() | ONE_THREAD, failures_most=1,
        limit_s=limit_s, keep_redis=keep,
    )  # fmt: skip
    started = time.monotonic()
    with showing_run(as_json=as_json, more_facts=lambda: [*run.facts, *reward_facts(settings)]) as on_status:
        run.run(on_status)
    if run.status:
        summary = collect(settings, run, seconds=time.monotonic() - started)
        lines = summary_facts(settings, summary)
        print_end(summary, lines, balanced=summary["audit"]["balanced"], as_json=as_json)
    if interrupts.signals:
        raise typer.Exit(128 + interrupts.signals[0])

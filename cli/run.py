"""`penstock run CONFIG.toml`: the orchestrator of a run."""

import logging
from pathlib import Path
from typing import Annotated

import orjson
import typer

from penstock import config as configuration


def run(
    config: Annotated[
        Path | None, typer.Argument(help="TOML; without it, the defaults and PENSTOCK_* variables.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run lives; resumed if it exists.")] = None,
    steps: Annotated[int | None, typer.Option(help="Stop after this many steps.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the last status as JSON.")] = False,
) -> None:
    """Drive a run: submit rollouts, form steps, recover what is lost. Ctrl-C drains, twice stops; resume either way."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    from orchestrator import start

    settings = configuration.load(config, flags={"run_dir": run_dir, "steps": steps})
    status = start.run(settings)
    if as_json:
        print(orjson.dumps(status, option=orjson.OPT_INDENT_2).decode())

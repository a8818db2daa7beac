"""`headpond doctor`: is the engine what the configuration says, and is everything else there that a run needs?"""

from pathlib import Path
from typing import Annotated

import typer

from headpond.commands.modules import find_modules
from headpond.commands.output import CONFIG_HELP, Json, print_json


def doctor(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG.toml", help=CONFIG_HELP, show_default=False)] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="URL", help="Examine only this engine. Separate replicas by commas.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Examine the engine as a run would use it, and print what was found.

    Plays a few short conversations and reads what was recorded: ids, logprobs and their mode, routed experts, turns
    with tools, versions, speed. With a configuration, Redis, the store, the environments and the workers too. Changes
    nothing. Exits with 1 if something would kill or spoil every rollout.
    """
    from headpond import config as configuration
    from headpond.commands.examination import examine
    from headpond.doctor.findings import problems
    from headpond.event_loop import factory as event_loop

    settings = configuration.load(config, flags={"engine.urls": engine})
    find_modules(config)
    findings = event_loop.run(examine(settings, surroundings=engine is None, show=not as_json), concurrency=8)
    if as_json:
        print_json({"findings": [vars(finding) for finding in findings]})
    if problems(findings):
        raise typer.Exit(1)

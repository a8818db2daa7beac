"""`headpond try CONFIG.toml`: plays a few examples of each environment against the engine, without Redis or workers."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from headpond.commands.modules import find_modules
from headpond.commands.output import CONFIG_HELP, Json, print_result

MOST_EXAMPLES = 1000


def try_environments(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG.toml", help=CONFIG_HELP, show_default=False)] = None,
    examples: Annotated[
        int, typer.Option(min=1, max=MOST_EXAMPLES, help="Examples of each environment, from the first one on.")
    ] = 3,
    first: Annotated[int, typer.Option(min=0, help="Number of the first example.")] = 0,
    environment: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this environment. May be repeated.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Play a few examples of each environment and show conversation, tokens and reward.

    Needs the engine only: no Redis, no workers, no run directory. Plays with the weights that the engine has, and shows
    their version. Nothing is kept. Exits with 1 if a rollout failed;
    an exception of the environment is shown with its traceback.
    """
    import tempfile

    from headpond import config as configuration
    from headpond.event_loop import factory as event_loop

    settings = configuration.load(config)
    find_modules(config)
    from headpond.commands import (
        tried_rollouts,  # after the settings: a wrong one is reported before Celery is imported
    )

    with tempfile.TemporaryDirectory(prefix="headpond-try-") as directory, ExitStack() as stack:
        store = (Path(directory) / "store").as_uri()
        (Path(directory) / "store").mkdir()
        update: dict[str, Any] = {"store": store}
        names = tried_rollouts.chosen(settings, environment or [])
        if tried_rollouts.needs_sessions(settings, names):
            url = stack.enter_context(tried_rollouts.session_server(config, Path(directory), store))
            update["sessions"] = settings.sessions.model_copy(update={"urls": (url,)})
        trial = tried_rollouts.Trial(settings.model_copy(update=update), names, range(first, first + examples))
        played = event_loop.run(trial.play(print_as_played=not as_json), concurrency=tried_rollouts.AT_ONCE)
    weights = {url: label.text for url, label in trial.weights.items()}
    content = {"rollouts": [vars(rollout) for rollout in played], "weights": weights}
    print_result(content, tried_rollouts.totals(played), as_json=as_json)
    if any(rollout.error for rollout in played):
        raise typer.Exit(1)

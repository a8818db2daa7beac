"""`penstock init DIR`: a configuration, an environment and a trainer to begin with."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.facts import Fact
from cli.output import Json, print_facts, print_json

if TYPE_CHECKING:
    from penstock.doctor.engine import Examination

START = Path(__file__).parents[1] / "examples" / "start"
FILES = ("run.toml", "sums.py", "trainer.py")
ENGINE = re.compile(r"^\[engine\]\n.*?(?=^\[)", re.MULTILINE | re.DOTALL)
ANNOUNCED = 'versions = "announced"  # by trainer.py; the engine\'s own, token by token: docs/engines.md'


def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write to. It is created.")],
    engine: Annotated[
        str | None, typer.Option(metavar="URL", help="Write the [engine] section for this server, after examining it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a run.toml with comments, an environment and a trainer to begin with.

    Asks nothing and overwrites nothing. With an engine, its section is what `penstock doctor` finds.
    """
    from penstock.errors import ConfigError

    if taken := [name for name in FILES if (directory / name).exists()]:
        raise ConfigError(f"{directory} has a {taken[0]}: choose another directory, or remove it")
    configuration = (START / "run.toml").read_text()
    if engine:
        section = f"{_examined(engine)}\n{ANNOUNCED}\n\n"
        configuration = ENGINE.sub(lambda _: section, configuration)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            text = configuration if name == "run.toml" else (START / name).read_text()
            (directory / name).write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror}") from error
    commands = [f"cd {directory}", "penstock doctor run.toml", "penstock try run.toml", "penstock up run.toml"]
    if as_json:
        print_json({"directory": str(directory.resolve()), "files": list(FILES), "next": commands})
    else:
        print_facts([*(Fact("wrote", str(directory / name)) for name in FILES), *_next(commands)])


def _next(commands: list[str]) -> list[Fact]:
    what = ["", "is the engine as it should be?", "plays three examples", "starts the run; Ctrl-C stops it"]
    texts = [f"{command:<26}{f'# {why}' if why else ''}".rstrip() for command, why in zip(commands, what, strict=True)]
    return [Fact("next" if not number else "", text) for number, text in enumerate(texts)]


def _examined(url: str) -> str:
    """The `[engine]` section for a server. Problems are printed; they do not keep the files from being written."""
    import asyncio

    from penstock import config
    from penstock.doctor.engine import Examination
    from penstock.errors import ConfigError
    from penstock.runtime.event_loop import event_loop_factory

    examination = Examination(config.load(None, flags={"engine.urls": url}, environ={}))
    with asyncio.Runner(loop_factory=event_loop_factory(concurrency=8)) as runner:
        problems = runner.run(_problems(examination))
    if not examination.facts:
        raise ConfigError(f"the engine cannot be examined: {problems[0] if problems else url}")
    for problem in problems:
        print(f"penstock doctor: {problem}", file=sys.stderr)
    return examination.block()


async def _problems(examination: "Examination") -> list[str]:
    from penstock.doctor.findings import Level

    return [finding.sentence async for finding in examination.findings() if finding.level is Level.WRONG]

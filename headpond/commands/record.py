"""`headpond record -- COMMAND`: one program's conversation with an engine, recorded token by token, without a run."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from headpond.commands.output import Json, print_json
from headpond.errors import ConfigError

STDERR = 2


def record(
    command: Annotated[list[str], Argument(metavar="COMMAND...", help="The program and its arguments, behind --.")],
    config: Annotated[Path | None, Option(metavar="CONFIG.toml", help="Settings of engine and sessions.")] = None,
    engine: Annotated[str | None, Option(help="URL of the engine. Default: engine.urls.")] = None,
    dialect: Annotated[str | None, Option(help="vllm, sglang or generate. Default: engine.dialect.")] = None,
    model: Annotated[str | None, Option(help="The engine's name for the model. Default: engine.model.")] = None,
    out: Annotated[Path, Option(help="Directory of the session's files and the transcript.")] = Path("recording"),
    as_json: Json = False,
) -> None:
    """Run a program against a session server in front of an engine, and write its conversation.

    The program finds the server in the variables that agents read (OPENAI_BASE_URL, ANTHROPIC_BASE_URL and others).
    Exits with the program's status. With --json, the program's output is on standard error.
    """
    import shutil
    import tempfile

    from headpond import config as configuration
    from headpond.commands import recorded_program

    if (program := shutil.which(command[0])) is None:
        raise ConfigError(f"there is no program {command[0]!r} to record")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not an empty directory: choose another --out")
    with _made(out), tempfile.TemporaryDirectory(prefix="headpond-record-") as scratch:
        flags = {
            "engine.urls": engine,
            "engine.dialect": dialect,
            "engine.model": model,
            "store": f"file://{scratch}",
            "sessions.host": "127.0.0.1",
            "sessions.port": 0,
            "sessions.require_secret": True,
        }
        loaded = configuration.load(config, flags=flags, section="sessions")
        stdout = STDERR if as_json else None  # standard output has the JSON alone
        summary = recorded_program.record(loaded, [program, *command[1:]], out, stdout=stdout)
    if as_json:
        print_json(summary)
    else:
        print(recorded_program.line(summary), file=sys.stderr)
    raise Exit(summary["exit_code"])


@contextmanager
def _made(directory: Path) -> Iterator[None]:
    """Made before the program runs, so that nothing is lost behind it; removed if nothing was written."""
    existed = directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create {directory}: {error.strerror}; choose another --out") from error
    try:
        yield
    finally:
        if not existed and not any(directory.iterdir()):
            directory.rmdir()

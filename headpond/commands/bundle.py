"""`headpond bundle RUN_DIR`: what a bug report needs, in one archive."""

from pathlib import Path
from typing import Annotated

import typer

from headpond.commands import facts
from headpond.commands.facts import Fact
from headpond.commands.output import Json, print_result
from headpond.commands.status import RunDir


def bundle(
    run_dir: RunDir,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Default: headpond-RUN.tar.gz in this directory.", show_default=False),
    ] = None,
    texts: Annotated[
        bool, typer.Option("--texts", help="Add texts of rollouts, and logs of engine and trainer.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write what a bug report needs of a run into one archive.

    Settings, versions of all packages, status, why, what died, excerpts of the ledger, the ends of logs and metrics.
    Secrets are replaced, and texts of rollouts are left out unless --texts is given; error messages and what
    environments print are in it. Look at it before you send it. Works during a run, after it and after a crash.
    """
    from headpond.config import redis_address
    from headpond.errors import RunError
    from headpond.inspection import bundle as inspection
    from headpond.inspection import run_json

    path = output or Path(f"headpond-{run_json.read(run_dir)['run']}.tar.gz")
    try:
        names = inspection.write(run_dir, path, redis_url=redis_address.from_environment(), texts=texts)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}; name another file with --output") from error
    size = path.stat().st_size
    wrote = Fact("wrote", f"{path}: {facts.counted(len(names), 'file')}, {size / 1e6:,.2f} MB")
    print_result({"path": str(path.resolve()), "bytes": size, "files": names}, [wrote], as_json=as_json)

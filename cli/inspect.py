"""`penstock status` and `penstock audit`: what is happening, and does it add up."""

from pathlib import Path
from typing import Annotated

import orjson
import typer


def status(
    run_dir: Path,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """What the run in RUN_DIR is doing, and what it waits for."""
    print((run_dir / "status.json").read_text())


def audit(run_dir: Path, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Whether every rollout of the run in RUN_DIR is accounted for."""
    from orchestrator import audit as auditor

    found = auditor.audit(run_dir)
    print(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
    if not found["balanced"]:
        raise typer.Exit(1)

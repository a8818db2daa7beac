"""`run.json` of a run directory: the run's id, its settings, and where its ledger, store and Redis are."""

from pathlib import Path
from typing import Any

import orjson

from headpond.errors import RunError
from headpond.version import refuse_old_run

KEYS = {"run", "settings", "redis", "ledger", "store"}


def read(run_dir: Path) -> dict[str, Any]:
    """The content of `run.json`. Paths below `run_dir` are relative to it, so that a run may be moved."""
    path = run_dir / "run.json"
    try:
        content: Any = orjson.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
        refuse_old_run(path, content)
        if KEYS - content.keys():
            raise ValueError("keys are missing")
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{run_dir} is not a run directory: there is no {path.name}") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise RunError(f"{path} is damaged ({error}): restore it, or use another run_dir") from error
    return content


def ledger_path(run_dir: Path) -> Path:
    return run_dir / read(run_dir)["ledger"]

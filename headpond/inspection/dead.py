"""What died in a run and why, and the request to play it again, which the orchestrator takes from the run directory."""

import contextlib
import time
import uuid
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from headpond.errors import RunError
from headpond.ids import GroupId, RolloutId
from headpond.inspection import run_json
from headpond.inspection.run_state import last_status
from headpond.ledger import histories, queries, schema
from headpond.store import atomic

FOLDER = "retry"  # of a run directory: the requests that no orchestrator has taken yet
CAUSES_SHOWN = 10
EXAMPLES_MOST = 10_000  # of one request


def dead(directory: Path) -> dict[str, Any]:
    """Causes with counts of the whole run; rollouts and examples as long as their histories are kept."""
    with schema.reading(run_json.ledger_path(directory)) as connection, queries.snapshot(connection):
        state = queries.run_state(connection, "quarantined")
        rollouts = histories.dead_rollouts(connection)
        causes = queries.dead_jobs(connection, limit=CAUSES_SHOWN)
        number = queries.progress(connection)["rollouts"]["dead"]
    return {
        "run": run_json.read(directory)["run"],
        "done": last_status(directory).phase == "done",
        "dead": number,
        "causes": causes,
        "rollouts": rollouts,
        "quarantined": [
            {"environment": environment, "example": example, "error": row.error}
            for environment, rows in sorted(state.environments.items())
            for example, row in rows.quarantined.items()
        ],
        "put_back": max([state.retried_group, *_requested(directory)]),
    }


def retry(directory: Path) -> dict[str, Any]:
    """Request that the examples of what died since the last request, and those in quarantine, are played again."""
    found = dead(directory)
    new = [each for each in found["rollouts"] if _ordinal(each["rollout"]) > found["put_back"]]
    unique = dict.fromkeys((each["environment"], each["example"]) for each in (*new, *found["quarantined"]))
    examples: dict[str, list[int]] = {}
    for environment, example in islice(unique, EXAMPLES_MOST):
        examples.setdefault(environment, []).append(example)
    until = max([found["put_back"], *(_ordinal(each["rollout"]) for each in new)])
    if examples:
        _write(directory, {"at": time.time(), "until": until, "examples": examples})
    return found | {"again": examples}


def _ordinal(rollout: str) -> int:
    return GroupId.parse(RolloutId.parse(rollout).group).ordinal


def _requested(directory: Path) -> Iterator[int]:
    """`until` of each request. The orchestrator may take one meanwhile: then the ledger has it."""
    for path in (directory / FOLDER).glob("*.json") if (directory / FOLDER).is_dir() else ():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            yield int(orjson.loads(path.read_bytes())["until"])


def _write(directory: Path, request: dict[str, Any]) -> None:
    folder = directory / FOLDER
    name = f"{time.time_ns()}-{uuid.uuid4().hex[:8]}.json"
    try:
        folder.mkdir(exist_ok=True)
        atomic.write(folder / name, orjson.dumps(request))
    except OSError as error:
        raise RunError(f"the request cannot be written to {folder}: {error.strerror}") from error

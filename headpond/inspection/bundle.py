"""What a bug report needs of a run, in one archive: settings, versions, status, why, excerpts of ledger and logs.

Without secrets: values that are named like one, passwords in URLs, and the values of such variables of this process.
Without texts of rollouts, unless asked: results, conversations and the policy's errors stay out, and so do the logs of
engine and trainer, which print what they like.
"""

import io
import os
import platform
import re
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import orjson

from headpond.errors import HeadpondError, LedgerError
from headpond.inspection import run_json
from headpond.inspection.dead import dead
from headpond.inspection.status import status
from headpond.inspection.why import why
from headpond.ledger import queries, schema

TAIL_BYTES = 256 << 10  # of each log and of metrics.jsonl
LOGS_MOST = 64
ROWS_MOST = 2_000  # of each table
WITH_TEXTS = ("engine.log", "trainer.log")  # of programs of the user, and what was rotated of them
TEXTS_MOST = 16  # rollouts whose texts are added, if asked
HIDDEN = "(hidden)"
SECRET_NAME = re.compile(r"(key|secret|password|passwd|token|credential)s?$", re.IGNORECASE)
LEAST_SECRET = 6  # characters: shorter values would hide ordinary words
IN_URL = re.compile(r"(://[^/\s:@'\"]*):[^@/\s'\"]+@")
NAMED = r"\w*(?:api_?key|secret|password|passwd|access_?token|auth_?token|credentials?)"
ASSIGNED = re.compile(rf"(?i)\b({NAMED})(['\"]?\s*[=:]\s*['\"]?)([^\s'\",}}]{{4,}})")
BEARER = re.compile(r"(?i)(bearer\s+)[\w.~+/=-]{6,}")
LEDGER = {
    "state": "SELECT kind, name, number, content FROM state WHERE "
    "(length(content) < 4096 OR kind = 'dead_jobs') AND kind NOT IN ('samplers', 'ended_groups', 'last_step')",
    "groups": "SELECT id, environment, example, state FROM groups ORDER BY ordinal LIMIT :rows",
    "rollouts": "SELECT grp || '-' || idx AS rollout, state, reason, step, attempt, error FROM rollouts LIMIT :rows",
    "jobs": "SELECT id, kind, subject, attempt, sequence, state, failures, losses, error FROM jobs LIMIT :rows",
    "batches": "SELECT * FROM batches ORDER BY step DESC LIMIT :rows",
    "events": "SELECT at, step, subject, action, detail FROM events ORDER BY id DESC LIMIT :rows",
}


def write(directory: Path, path: Path, *, redis_url: str | None = None, texts: bool = False) -> list[str]:
    """Write the archive; returns the names of its files. What cannot be read is named in `problems.txt`."""
    names: list[str] = []
    problems: list[str] = []
    root = f"headpond-{run_json.read(directory)['run']}"
    hide = Redaction()
    with tarfile.open(path, "w:gz") as archive:
        for name, content in _files(directory, redis_url, texts, problems):
            _add(archive, f"{root}/{name}", hide(content).encode())
            names.append(name)
        if problems:
            _add(archive, f"{root}/problems.txt", hide("\n".join(problems)).encode())
            names.append("problems.txt")
    return names


class Redaction:
    """Replaces secrets in a text."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        values = {value for name, value in environ.items() if SECRET_NAME.search(name) and len(value) >= LEAST_SECRET}
        found = (re.search(r"://[^/\s:@]*:([^@/\s]+)@", value) for value in environ.values())
        values |= {match[1] for match in found if match and len(match[1]) >= LEAST_SECRET}
        self._values = sorted(values, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for value in self._values:
            text = text.replace(value, HIDDEN)
        text = IN_URL.sub(rf"\1:{HIDDEN}@", text)
        text = BEARER.sub(rf"\1{HIDDEN}", text)
        return ASSIGNED.sub(rf"\1\2{HIDDEN}", text)


def _files(directory: Path, redis_url: str | None, texts: bool, problems: list[str]) -> Iterator[tuple[str, str]]:
    yield "versions.json", _json(versions())
    for name, read in {
        "status.json": lambda: status(directory, redis_url).model_dump(),
        "why.json": lambda: why(directory, redis_url),
        "dead.json": lambda: dead(directory),
        "ledger.json": lambda: _ledger(directory),
    }.items():
        try:
            yield name, _json(read())
        except (HeadpondError, OSError) as error:
            problems.append(f"{name}: {error}")
    for name, path in _paths(directory):
        if path.name.startswith(WITH_TEXTS) and not texts:
            problems.append(f"{name}: may have texts of rollouts; --texts adds it")
            continue
        try:
            yield name, _tail(path)
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
    if texts:
        yield "rollouts.json", _json(_texts(directory))


def _paths(directory: Path) -> Iterator[tuple[str, Path]]:
    for name in ("run.json", "audited.json", "metrics.jsonl"):
        if (directory / name).exists():
            yield name if name == "metrics.jsonl" else f"run_dir/{name}", directory / name
    trainer = sorted((directory / "trainer").glob("*.json")) if (directory / "trainer").is_dir() else []
    logs = sorted(directory.glob("logs/*.log*"))[:LOGS_MOST]
    for path in (*trainer, *logs, *sorted(directory.glob("redis/*.log"))):
        yield str(path.relative_to(directory)), path


def versions() -> dict[str, Any]:
    """Of Python, the system and every installed package."""
    packages = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": sys.version,
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "packages": dict(sorted(packages.items())),
    }


def _ledger(directory: Path) -> dict[str, Any]:
    with schema.reading(run_json.ledger_path(directory)) as connection, queries.snapshot(connection):
        tables: dict[str, Any] = {}
        for name, query in LEDGER.items():
            rows = connection.execute(query, {"rows": ROWS_MOST} if ":rows" in query else {})
            columns = [column[0] for column in rows.description]
            tables[name] = [dict(zip(columns, row, strict=True)) for row in rows.fetchall()]
        return tables


def _texts(directory: Path) -> list[dict[str, Any]]:
    """The last rollouts with their whole results, and their conversations if `batch.rollouts_jsonl` writes them."""
    try:
        with schema.reading(run_json.ledger_path(directory)) as connection:
            rows = connection.execute(
                "SELECT id, state, error, result FROM kept_results WHERE result IS NOT NULL ORDER BY id DESC LIMIT ?",
                (TEXTS_MOST,),
            ).fetchall()
    except LedgerError:
        return []
    lines: list[dict[str, Any]] = [
        {"rollout": id, "state": state, "error": error, "result": orjson.loads(result)}
        for id, state, error, result in rows
    ]
    for path in sorted(directory.glob("store/batches/*/rollouts.*.jsonl"))[-1:]:
        lines += [orjson.loads(line) for line in path.read_bytes().splitlines()[:TEXTS_MOST]]
    return lines


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace")


def _json(content: Any) -> str:
    return orjson.dumps(content, option=orjson.OPT_INDENT_2, default=str).decode()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mtime = len(content), int(time.time())
    archive.addfile(member, io.BytesIO(content))

"""`headpond bundle`: what is in the archive, and what is not."""

import asyncio
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
from support.ledgers import generated
from typer.testing import CliRunner

from headpond.commands.main import app
from headpond.config import RunConfig
from headpond.inspection.bundle import HIDDEN, TAIL_BYTES, Redaction
from headpond.orchestrator import run_dir
from headpond.orchestrator.ledger.ledger import Ledger

SAID = "the policy said that the answer is fortytwo"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run without Redis that has crashed, with a log and a rollout whose result has a text."""
    monkeypatch.setenv("HEADPOND_REDIS_URL", "redis://:hunter2hunter2@127.0.0.1:1/0")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    config = RunConfig(run_dir=tmp_path / "run", redis_url="redis://:hunter2hunter2@127.0.0.1:1/0")
    run_dir.create_directories(config)
    run_dir.begin_or_resume(config)

    async def play() -> None:
        ledger = Ledger(config.ledger_path)
        group = generated(ledger, 1, policy_error=SAID)
        ledger.event(group.id, "failed", "HTTP 401: api_key=abcd1234")
        await ledger.committed()
        ledger.close()

    asyncio.run(play())
    logs = config.run_dir / "logs"
    logs.mkdir()
    lines = ["redis://:hunter2hunter2@127.0.0.1:1/0", "Authorization: Bearer abcdefghij", "WANDB 0123456789abcdef"]
    for name in ("engine.log", "engine.log.1", "trainer.log"):
        (logs / name).write_text(f"prompt: {SAID}")
    (logs / "orchestrator.log").write_text("x" * TAIL_BYTES + "\n" + "\n".join(lines))
    return config.run_dir


def bundled(run: Path, tmp_path: Path, *options: str) -> dict[str, str]:
    """name -> content"""
    path = tmp_path / "bundle.tar.gz"
    result = CliRunner().invoke(app, ["bundle", str(run), "--output", str(path), "--json", *options])
    assert result.exit_code == 0, result.output
    said: dict[str, Any] = json.loads(result.stdout)
    assert said["bytes"] == path.stat().st_size
    with tarfile.open(path) as archive:
        files = {name: archive.extractfile(name) for name in archive.getnames()}
        contents = {name.partition("/")[2]: file.read().decode() for name, file in files.items() if file}
    assert sorted(contents) == sorted(said["files"])
    return contents


def test_an_archive_has_what_a_bug_report_needs(run: Path, tmp_path: Path) -> None:
    contents = bundled(run, tmp_path)
    assert {"versions.json", "status.json", "why.json", "dead.json", "ledger.json", "run_dir/run.json"} <= set(contents)
    assert json.loads(contents["versions.json"])["packages"]["celery"]
    assert "the orchestrator is not running" in contents["why.json"]
    ledger = json.loads(contents["ledger.json"])
    assert [(row["id"], row["example"]) for row in ledger["groups"]] == [("g0000001", 0)]
    assert ledger["events"][0]["action"] == "failed"
    assert [row["content"] for row in ledger["state"] if row["kind"] == "run"]


def test_an_archive_has_neither_secrets_nor_texts_of_rollouts(run: Path, tmp_path: Path) -> None:
    everything = "\n".join(bundled(run, tmp_path).values())
    for secret in ("hunter2", "abcdefghij", "0123456789abcdef", "abcd1234", SAID):
        assert secret not in everything
    assert re.search(r"logs/engine\.log: .*--texts", everything)
    assert f"redis://:{HIDDEN}@127.0.0.1:1/0" in everything
    assert len(bundled(run, tmp_path)["logs/orchestrator.log"]) <= TAIL_BYTES + len(HIDDEN) * 4


def test_texts_are_added_if_asked(run: Path, tmp_path: Path) -> None:
    contents = bundled(run, tmp_path, "--texts")
    for name in ("rollouts.json", "logs/engine.log", "logs/engine.log.1", "logs/trainer.log"):
        assert SAID in contents[name]


def test_a_redaction_leaves_ordinary_words() -> None:
    hide = Redaction({"API_TOKEN": "sesame-open", "SHORT_KEY": "a", "HOME": "/root"})
    words = "/root a tokens=12 key: steps_delivered"
    assert hide(f"sesame-open {words}") == f"{HIDDEN} {words}"
    assert hide('{"password": "opensesame", "n": 1}') == f'{{"password": "{HIDDEN}", "n": 1}}'
    assert hide("amqp://me:opensesame@host/1 http://host:80/x") == f"amqp://me:{HIDDEN}@host/1 http://host:80/x"

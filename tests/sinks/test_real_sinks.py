"""`make test-sinks`: the real packages, offline."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

LINES = [{"step": step, "time": 1000 + step, "reward_mean": step / 4} for step in range(5)]


def send(run_dir: Path, *sinks: str, **variables: str) -> None:
    """Until its stdin ends, which is at once."""
    (run_dir / "run.json").write_text(json.dumps({"run": "0123456789ab", "settings": {"seed": 0}}))
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in LINES))
    program = "headpond.sinks.process"
    command = [sys.executable, "-m", program, str(run_dir), "0123456789ab", "tests", "made"]
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(run_dir), **variables}
    done = subprocess.run([*command, *sinks], input="", env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_tensorboard_reads_the_event_files(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter  # noqa: F401 - the package is there

    send(tmp_path, "tensorboard")
    (file,) = (tmp_path / "tensorboard").iterdir()
    content, found = file.read_bytes(), dict[int, float]()
    while content:
        length = int.from_bytes(content[:8], "little")
        event = Event.FromString(content[12 : 12 + length])
        for each in event.summary.value:
            if each.tag == "reward_mean":
                found[event.step] = each.simple_value
        content = content[16 + length :]
    assert found == {line["step"]: pytest.approx(line["reward_mean"]) for line in LINES}


def test_wandb_records_offline(tmp_path: Path) -> None:
    send(tmp_path, "wandb", WANDB_MODE="offline", WANDB_SILENT="true")
    (recorded,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"reward_mean" in recorded.read_bytes()


def test_trackio_keeps_the_steps_in_its_database(tmp_path: Path) -> None:
    import sqlite3

    send(tmp_path, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    (database,) = (tmp_path / "trackio").rglob("tests.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    assert [(step, json.loads(text)["reward_mean"]) for step, text in rows] == [
        (line["step"], line["reward_mean"]) for line in LINES
    ]

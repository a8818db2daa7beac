"""Run directories of 0.2.0 and of Penstock are refused by every reader, and are unchanged.

`tests/vectors/record_run.py` made it: steps 0 and 1 were trained and step 2 was encoded when its orchestrator was
killed, and rollouts of other groups were submitted.
"""

import json
import tarfile
from pathlib import Path

import pytest
from support.pipeline import pipeline_in

from headpond.batches import BatchReader
from headpond.errors import RunError
from headpond.inspection import run_json

LEFT = ("lock", "ledger.sqlite-shm")  # a reader of a ledger with a write-ahead log creates the second
RUN = Path(__file__).parents[1] / "vectors" / "run_of_0_2_0.tar.xz"
SETTINGS = {
    "batch": {"size": 2, "seq_len": 4096},
    "rollouts": {"group_size": 2, "max_in_flight": 8},
    "trainer": {"max_steps_ahead": "unlimited"},
}


def unpack(directory: Path) -> None:
    with tarfile.open(RUN) as archive:
        archive.extractall(directory, filter="data")


def contents(directory: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in directory.rglob("*") if file.is_file() and file.name not in LEFT}


def test_a_run_of_0_2_0_is_refused_and_unchanged(tmp_path: Path) -> None:
    with pipeline_in(tmp_path / "pipeline", **SETTINGS) as pipeline:
        pipeline.new_run("old")
        cluster = pipeline.cluster
        unpack(cluster.run_dir)
        assert run_json.read(cluster.run_dir)["release"].startswith("0.2.0 ")
        before = contents(cluster.run_dir)
        for command in ("run", "audit", "gc", "status"):
            process = cluster.orchestrator() if command == "run" else cluster.headpond(command, str(cluster.run_dir))
            assert process.wait() == (0 if command == "status" else 2), process.text
            assert "was written by another version of Headpond" in process.text
            assert "use the version that started the run, or another run_dir" in process.text
            assert "Traceback" not in process.text
        assert contents(cluster.run_dir) == before


def test_a_run_of_penstock_is_refused_by_every_reader(tmp_path: Path) -> None:
    with pipeline_in(tmp_path / "pipeline", **SETTINGS) as pipeline:
        pipeline.new_run("old")
        cluster = pipeline.cluster
        unpack(cluster.run_dir)
        path = cluster.run_dir / "run.json"
        content = json.loads(path.read_text())
        del content["release"]  # Penstock wrote none
        path.write_text(json.dumps(content))
        before = contents(cluster.run_dir)
        resumed = (str(cluster.config), "--run-dir", str(cluster.run_dir))
        for command in ("run", "up", "status", "audit", "why", "gc"):
            process = cluster.headpond(command, *(resumed if command in ("run", "up") else [str(cluster.run_dir)]))
            assert process.wait() == 2, process.text
            assert "was written by Penstock" in process.text
            assert "run_dir" in process.text
            assert "Traceback" not in process.text
        with pytest.raises(RunError, match="was written by Penstock"):
            BatchReader(cluster.run_dir, data_rank=0, data_ranks=1)
        assert contents(cluster.run_dir) == before

"""A run directory of an earlier version is resumed by this one, with real processes; one of Penstock is refused.

`tests/vectors/record_run.py` made it: steps 0 and 1 were trained and step 2 was encoded when its orchestrator was
killed, and rollouts of other groups were submitted.
"""

import json
import tarfile
from pathlib import Path

import pytest
from support.cluster import RUN_DIR_AT_THE_END
from support.pipeline import hashes, pipeline_in
from support.stores import manifest_path

from headpond.batches import BatchReader
from headpond.errors import RunError
from headpond.inspection import run_json
from headpond.version import release

RUN = Path(__file__).parents[1] / "vectors" / "run_of_0_2_0.tar.xz"
DELIVERED = "SELECT id, reason, step, advantage FROM all_rollouts WHERE step < 2 ORDER BY id"
SETTINGS = {
    "batch": {"size": 2, "seq_len": 4096},
    "rollouts": {"group_size": 2, "max_in_flight": 8},
    "trainer": {"max_steps_ahead": "unlimited"},
}


def unpack(directory: Path) -> None:
    with tarfile.open(RUN) as archive:
        archive.extractall(directory, filter="data")


def test_a_run_of_0_2_0_is_resumed_to_its_end(tmp_path: Path) -> None:
    with pipeline_in(tmp_path / "pipeline", **SETTINGS) as pipeline:
        pipeline.new_run("upgraded")
        cluster = pipeline.cluster
        unpack(cluster.run_dir)
        assert run_json.read(cluster.run_dir)["release"].startswith("0.2.0 ")
        before = cluster.headpond("audit", str(cluster.run_dir))
        assert before.exit_code == 0, before.text
        sealed = [manifest_path(pipeline.store, step).read_bytes() for step in (0, 1)]
        delivered = cluster.ledger(DELIVERED)
        assert len(delivered) == 8
        cluster.rollout_worker()
        cluster.compute_worker()
        run = cluster.orchestrator()
        trainer = pipeline.trainer(resume_step=1, checkpoint_every=1)
        result = pipeline.finish(run, trainer)
        assert result["steps"] == 4
        assert sorted(hashes(trainer)) == [2, 3]
        assert [manifest_path(pipeline.store, step).read_bytes() for step in (0, 1)] == sealed
        assert cluster.ledger(DELIVERED) == delivered
        assert run_json.read(cluster.run_dir)["release"] == release()
        collected = cluster.headpond("gc", str(cluster.run_dir), "--json")
        assert json.loads(collected.text)["troubles"] == [], collected.text
        assert cluster.audit()["balanced"], "of all files that are left"
        assert sorted(path.name for path in cluster.run_dir.iterdir()) == sorted([*RUN_DIR_AT_THE_END, "store"])


def test_a_run_of_penstock_is_refused_by_every_reader(tmp_path: Path) -> None:
    with pipeline_in(tmp_path / "pipeline", **SETTINGS) as pipeline:
        pipeline.new_run("old")
        cluster = pipeline.cluster
        unpack(cluster.run_dir)
        path = cluster.run_dir / "run.json"
        content = json.loads(path.read_text())
        del content["release"]  # Penstock wrote none
        path.write_text(json.dumps(content))
        before = {
            file: file.read_bytes() for file in cluster.run_dir.rglob("*") if file.is_file() and file.name != "lock"
        }
        resumed = (str(cluster.config), "--run-dir", str(cluster.run_dir))
        for command in ("run", "up", "status", "audit", "why", "gc"):
            process = cluster.headpond(command, *(resumed if command in ("run", "up") else [str(cluster.run_dir)]))
            assert process.wait() == 2, process.text
            assert "was written by Penstock" in process.text
            assert "run_dir" in process.text
            assert "Traceback" not in process.text
        with pytest.raises(RunError, match="was written by Penstock"):
            BatchReader(cluster.run_dir, data_rank=0, data_ranks=1)
        after = {file: file.read_bytes() for file in cluster.run_dir.rglob("*") if file.is_file()}
        assert {file: text for file, text in after.items() if file.name != "lock"} == before

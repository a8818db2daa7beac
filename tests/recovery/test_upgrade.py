"""A run directory of release 0.1 (commit 2c07818) is resumed by this release, with real processes.

Its orchestrator was killed when steps 0 and 1 were trained and step 2 was encoded, with two rollouts and a job of
another group submitted.
"""

import json
import tarfile
from pathlib import Path

from support.cluster import RUN_DIR_AT_THE_END
from support.pipeline import hashes, pipeline_in
from support.stores import manifest_path

from headpond.orchestrator import run_dir

RUN = Path(__file__).parents[1] / "vectors" / "run_of_release_0_1.tar.xz"
TRAINED = "SELECT * FROM all_rollouts WHERE state = 'trained' AND step < 2 ORDER BY id"
SETTINGS = {
    "batch": {"size": 2, "seq_len": 4096},
    "rollouts": {"group_size": 2, "max_in_flight": 8},
    "trainer": {"max_steps_ahead": "unlimited"},
}


def unpack(directory: Path) -> None:
    with tarfile.open(RUN) as archive:
        archive.extractall(directory, filter="data")


def test_a_run_of_release_0_1_is_resumed_to_its_end(tmp_path: Path) -> None:
    with pipeline_in(tmp_path / "pipeline", **SETTINGS) as pipeline:
        pipeline.new_run("upgraded")
        cluster = pipeline.cluster
        unpack(cluster.run_dir)
        assert "identity" in run_dir.read(cluster.run_dir)
        before = cluster.headpond("audit", str(cluster.run_dir))
        assert before.exit_code == 0, before.text
        sealed = [manifest_path(pipeline.store, step).read_bytes() for step in (0, 1)]
        delivered = cluster.ledger(TRAINED)
        cluster.rollout_worker()
        cluster.compute_worker()
        run = cluster.orchestrator()
        trainer = pipeline.trainer(resume_step=1, checkpoint_every=1)
        result = pipeline.finish(run, trainer)
        assert result["steps"] == 4
        assert sorted(hashes(trainer)) == [2, 3]
        assert [manifest_path(pipeline.store, step).read_bytes() for step in (0, 1)] == sealed
        assert cluster.ledger(TRAINED) == delivered
        assert "settings" in run_dir.read(cluster.run_dir)
        collected = cluster.headpond("gc", str(cluster.run_dir), "--json")
        assert json.loads(collected.text)["troubles"] == [], collected.text
        assert cluster.audit()["balanced"], "of all files that are left"
        assert sorted(path.name for path in cluster.run_dir.iterdir()) == sorted([*RUN_DIR_AT_THE_END, "store"])

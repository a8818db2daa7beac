"""A store in a package outside the project, through a whole run with real processes, up to the trainer."""

import json
import os
import sys
from pathlib import Path

import pytest
from support.pipeline import TRAINER, hashes, pipeline_in

from headpond.batches import read_manifests
from headpond.store import open_store

ROOT = Path(__file__).parents[2]


def test_a_store_from_outside_serves_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "outside" / "shelf"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text((ROOT / "examples" / "sqlite_store.py").read_text())
    (tmp_path / "a disk").mkdir()
    (tmp_path / "scratch").mkdir()
    url = f"shelf:SqliteStore://{tmp_path}/a%20disk/blobs.sqlite"
    with pipeline_in(tmp_path / "pipeline", store=url, steps=2) as pipeline:
        pipeline.new_run("own-store")
        cluster = pipeline.cluster
        cluster.variables = {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(package.parent)]),
            "TMPDIR": str(tmp_path / "scratch"),
            "TRAINER_HAS": "shelf",  # beside numpy and xxhash
        }
        cluster.rollout_worker()
        cluster.compute_worker()
        run = cluster.orchestrator()
        arguments = [str(cluster.run_dir), "0", "1", "-1", "-1", "1"]
        trainer = cluster.start("trainer", sys.executable, str(TRAINER), *arguments)
        assert run.wait() == 0, run.text[-3000:]
        assert trainer.wait() == 0, trainer.text[-3000:]
        assert sorted(hashes(trainer)) == [0, 1]
        audit = cluster.headpond("audit", str(cluster.run_dir), "--json")
        assert json.loads(audit.text)["balanced"], audit.text
        status = cluster.headpond("status", str(cluster.run_dir), "--json")
        assert json.loads(status.text)["state"] == "done"
        monkeypatch.syspath_prepend(package.parent)
        store = open_store(url)
        manifests = read_manifests(store)
        assert sorted(manifests) == [0, 1]
        assert list(store.keys("plans")) == []
        named = {
            ref.key
            for each in manifests.values()
            for rank in each.ranks
            for ref in (rank.file, rank.rollouts_jsonl)
            if ref
        }
        manifest_keys = {f"{each.plan.directory}/manifest.json" for each in manifests.values()}
        assert set(store.keys("batches")) == named | manifest_keys
        assert f"batches    {url}/batches\n" in run.text
        assert not (cluster.run_dir / "store").exists()
    left = [path for path in (tmp_path / "scratch").rglob("*") if path.is_file() and path.name != ".lock"]
    assert left == []

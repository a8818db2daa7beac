"""The short names of a clone, `celery -A workers.rollouts` and `celery -A tasks flower`, load no module twice."""

import signal
from pathlib import Path

import pytest
from support.cluster import BIN, cluster_in
from support.processes import free_port
from support.waiting import wait_until

ROOT = Path(__file__).parents[2]
AT_EXIT = """
import atexit, os, sys
atexit.register(lambda: open(os.environ["LOADED_MODULES"], "w").write(" ".join(sys.modules)))
"""
FOLDERS = ("tasks", "workers", "orchestrator")


@pytest.mark.parametrize(
    ("arguments", "ready", "twice"),
    [
        ("-A workers.rollouts worker -Q rollouts -c 4 -l INFO", "action=worker_ready", {"workers"}),
        ("-A tasks flower --address=127.0.0.1 --port={port}", "Connected to redis", {"tasks"}),
    ],
    ids=["worker", "flower"],
)
def test_a_short_name_is_the_entry_alone(tmp_path: Path, arguments: str, ready: str, twice: set[str]) -> None:
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT)
    with cluster_in(tmp_path / "cluster") as cluster:
        command = f"cd {ROOT} && exec {BIN}/celery {arguments.format(port=free_port())}"
        loaded = tmp_path / "modules"
        process = cluster.start("celery", "sh", "-c", command, PYTHONPATH=str(tmp_path), LOADED_MODULES=str(loaded))
        wait_until(lambda: ready in process.text, what="its start")
        process.signal(signal.SIGTERM)
        process.wait()
        modules = set(loaded.read_text().split())
    short = {name for name in modules if name.partition(".")[0] in FOLDERS}
    assert {name for name in short if f"headpond.{name}" in modules} == twice
    assert short == twice | {"workers.rollouts"} & modules, "the entry module, and nothing that it imports"

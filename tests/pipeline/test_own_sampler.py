"""A sampler of a package outside the project: through a run with kills, and refused at start."""

import json
import signal
from pathlib import Path
from typing import Any

from support.cluster import Cluster, cluster_in

PROJECT = Path(__file__).parents[2]
SAMPLER = """
import os
from pathlib import Path

with Path(os.environ["OWN_SAMPLER_LOG"]).open("a") as log:
    log.write(f"{os.getpid()}\\n")

class Strides:
    def __init__(self, *, size, seed, stride):
        self.size, self.stride = size, stride

    def draw(self, count, played, state):
        drawn, told = (state["drawn"], state["told"]) if state else (0, [])
        told += [[group.example, len(group.rewards), group.dropped] for group in played]
        return [number * self.stride % self.size for number in range(drawn, drawn + count)], {
            "drawn": drawn + count, "told": told
        }

class Failing(Strides):
    def draw(self, count, played, state):
        raise ValueError("no data today")
"""


def write_package(directory: Path) -> dict[str, str]:
    """Returns the environment variables of processes that use it."""
    package = directory / "elsewhere" / "own_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "data.py").write_text(SAMPLER)
    return {"PYTHONPATH": f"{PROJECT}:{package.parent}", "OWN_SAMPLER_LOG": str(directory / "sampler.log")}


def configured(name: str, **more: Any) -> dict[str, Any]:
    return {"environments.noop": {"use": "noop", "sampler": name} | more}


def played(cluster: Cluster) -> list[int]:
    query = "SELECT ordinal, example FROM groups UNION SELECT ordinal, example FROM closed_groups ORDER BY ordinal"
    return [example for _, example in cluster.ledger(query)]


def told(cluster: Cluster) -> list[Any]:
    rows = cluster.ledger("SELECT json_extract(content, '$.state') FROM state WHERE kind = 'samplers'")
    return json.loads(rows[0][0])["state"]["told"] if rows and rows[0][0] else []


def test_a_sampler_of_another_package_survives_kills_of_the_orchestrator(tmp_path: Path) -> None:
    variables = write_package(tmp_path)
    settings = configured("own_package.data:Strides")
    with cluster_in(tmp_path / "cluster", steps=12, noop={"examples": 1000, "drop_rate": 0.3}, **settings) as cluster:
        options = "[environments.noop.sampler_options]\nstride = 7\n"
        cluster.config.write_text(cluster.config.read_text() + options)
        cluster.rollout_worker(**variables)
        cluster.compute_worker(**variables)
        orchestrators = []
        for point in ("planned:2", "submitted:3", "replies_read:4", "replies_committed:6", "composed:2"):
            killed = cluster.orchestrator(CRASH_AT=point, **variables)
            assert killed.wait() == -signal.SIGKILL, killed.text[-2000:]
            orchestrators.append(killed)
        orchestrators.append(cluster.orchestrator(**variables))
        assert cluster.finish(orchestrators[-1])["steps"] == 12
        examples = played(cluster)
        assert examples == [number * 7 % 1000 for number in range(len(examples))]
        rows = cluster.ledger("SELECT json_extract(content, '$.example') FROM state WHERE kind = 'ended_groups'")
        ended = [example for (example,) in rows]
        assert len(ended) >= 48  # the delivered groups and more, each once
        assert len(set(ended)) == len(ended)
        known = [example for example, *_ in told(cluster)]
        assert known
        assert len(set(known)) == len(known)
        assert set(known) <= set(ended) <= set(examples)
        imported_by = set(map(int, Path(variables["OWN_SAMPLER_LOG"]).read_text().split()))
        assert imported_by.isdisjoint(each.pid for each in orchestrators)


def test_a_sampler_that_cannot_be_used_stops_the_run_before_a_rollout(tmp_path: Path) -> None:
    variables = write_package(tmp_path)
    with cluster_in(tmp_path / "cluster", **configured("own_package.data:Stride")) as cluster:
        for process, code in ((cluster.orchestrator(**variables), 2), (cluster.compute_worker(**variables), 1)):
            assert process.wait() == code, process.text
            assert "module own_package.data has no 'Stride'; did you mean 'Strides'?" in process.text
            assert "headpond.toml, line" in process.text
        assert not cluster.run_dir.exists()
        cluster.configure(**configured("own_package.data:Failing", sampler_options={"stride": 1}))
        cluster.config.write_text(cluster.config.read_text().replace('{"stride": 1}', "{ stride = 1 }"))
        cluster.rollout_worker(**variables)
        cluster.compute_worker(**variables)
        run = cluster.orchestrator(**variables)
        assert run.wait() == 2, run.text[-2000:]
        assert "environments.noop.sampler = 'own_package.data:Failing' failed" in run.text
        assert "ValueError: no data today" in run.text
        assert cluster.ledger("SELECT count(*) FROM all_rollouts") == [(0,)]

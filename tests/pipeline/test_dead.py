"""A poison example: it dies, is named and skipped; `headpond dead --retry` has it played again."""

from pathlib import Path
from typing import Any

import pytest
from support.cluster import Cluster
from support.pipeline import pipeline_in
from support.waiting import wait_until

from headpond.inspection.dead import dead

ENVIRONMENT = """
from pathlib import Path


class Poisoned:
    examples = list(range(4))

    async def rollout(self, example, policy):
        if example == 2 and not Path(__file__).with_name("antidote").exists():
            raise RuntimeError("no such image: 2.png")
        completion = await policy.chat([{"role": "user", "content": f"What is {example} + 1?"}])
        return float(len(completion.content) % 2)
"""


@pytest.mark.slow
def test_a_poison_example_is_named_skipped_and_put_back(tmp_path: Path) -> None:
    (tmp_path / "poisoned.py").write_text(ENVIRONMENT)
    environments = {"environments.poisoned": {"use": "poisoned:Poisoned", "order": "in_order"}}
    with pipeline_in(tmp_path / "run", steps=1000, batch={"size": 2}, **environments) as pipeline:
        cluster = pipeline.cluster
        pipeline.new_run("poison", trainer={"max_steps_ahead": "unlimited"}, recovery={"max_failures": 1})
        cluster.variables["PYTHONPATH"] = f"{Path(__file__).parents[2]}:{tmp_path}"
        cluster.rollout_worker()
        cluster.compute_worker()
        cluster.orchestrator()
        named = wait_until(lambda: _quarantined(cluster), what="the quarantine of the example")
        assert named == [{"environment": "poisoned", "example": 2, "error": named[0]["error"]}]
        assert "no such image: 2.png" in named[0]["error"]
        noted = lambda: any("example 2 of poisoned" in note for note in cluster.status().notes)  # noqa: E731
        wait_until(noted, what="the status to name it")
        open_groups = "SELECT count(*) FROM groups WHERE example = 2 AND state != 'closed'"
        wait_until(lambda: not cluster.ledger(open_groups)[0][0], what="the end of groups that had begun before")
        dead_rollouts = (
            "SELECT content ->> '$.by_name.dead' FROM state WHERE kind = 'rollout_counts' AND name = 'states'"
        )
        died, step = cluster.ledger(dead_rollouts), cluster.status().step
        wait_until(lambda: cluster.status().step >= step + 4, what="steps without the example")
        assert cluster.ledger(dead_rollouts) == died, "it was not played again"
        (tmp_path / "antidote").touch()
        text = cluster.headpond("dead", str(cluster.run_dir), "--retry").text
        assert "put back   1 example (poisoned 1) to be played again" in text
        assert len([line for line in text.splitlines() if line.startswith("rollouts   of poisoned, example 2: g")]) == 1
        wait_until(lambda: not _quarantined(cluster), what="the end of the quarantine")
        played = "SELECT count(*) FROM closed_groups WHERE example = 2 AND step IS NOT NULL"
        wait_until(lambda: cluster.ledger(played)[0][0] > 0, what="a step with the example")
        assert "put back   nothing" in cluster.headpond("dead", str(cluster.run_dir), "--retry").text


def _quarantined(cluster: Cluster) -> list[dict[str, Any]]:
    return dead(cluster.run_dir)["quarantined"] if cluster.status().at else []

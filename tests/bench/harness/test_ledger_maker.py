import asyncio
from pathlib import Path

from bench.harness.ledger_maker import make_ledger
from headpond.ledger import queries, schema
from headpond.ledger.states import RolloutState
from headpond.orchestrator.ledger.ledger import Ledger

ROLLOUTS = 20_000


def test_a_made_ledger_is_one_that_a_run_could_have_left(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    make_ledger(path, ROLLOUTS, step_rollouts=256)
    with schema.reading(path) as connection:
        assert list(queries.structure_problems(connection, limit=1)) == []
        progress = queries.progress(connection)
        assert (progress["rollouts"]["planned"], progress["rollouts"]["balanced"]) == (ROLLOUTS, True)
        assert (progress["step"], progress["rollouts"]["delivered"]) == (63, 16_000)
        delivered = list(queries.delivered_rollouts(connection, from_step=61))
        files = list(
            queries.delivered_files(connection, "run", {rollout.partition("-")[0] for _, rollout in delivered})
        )
        assert sorted(file.rollout for file in files) == sorted(rollout for _, rollout in delivered)
        assert all(file.columns and file.experts for file in files)
    ledger = Ledger(path)
    ledger.plan(environment="noop", example=0, size=8)
    asyncio.run(ledger.committed())
    ledger.close()
    assert ledger.states[RolloutState.PLANNED] == 8
    assert ledger.untrained == {62: 128}

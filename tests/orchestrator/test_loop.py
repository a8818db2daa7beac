"""What the parts of the orchestrator say together."""

import asyncio
from pathlib import Path

import pytest
from support.ledgers import admitted, configured

from headpond.config import RunConfig
from headpond.engines.replicas.control import Load
from headpond.event_loop.lag_summaries import redis_publisher
from headpond.orchestrator.components import PROCESS
from headpond.orchestrator.duties.housekeeping import Troubles
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.lock import RunLock
from headpond.orchestrator.loop import Orchestrator
from headpond.orchestrator.reporting.reporter import ignore_status
from headpond.orchestrator.shutdown import StopRequests


def orchestrating(config: RunConfig, ledger: Ledger, broker: Broker) -> Orchestrator:
    return Orchestrator(
        config, run="run", ledger=ledger, broker=broker, lock=RunLock(config.run_dir, broker, run="run", epoch=1),
        lag=config.lag.watch(PROCESS, redis_publisher(broker.client)), stop=StopRequests(), on_status=ignore_status,
        troubles=Troubles(),
    )  # fmt: skip


@pytest.mark.parametrize(("delivered", "notes"), [(2, 1), (3, 0)])
def test_the_load_of_the_engine_is_noted_until_the_last_step_is_delivered(
    tmp_path: Path, ledger: Ledger, delivered: int, notes: int
) -> None:
    config = configured(run_dir=tmp_path, steps=3)

    async def noted() -> list[str]:
        broker = Broker(config.redis_url)
        orchestrator = orchestrating(config, ledger, broker)
        load = Load(running=32, waiting=34, cache_use=0.1, preemptions=0)
        orchestrator.load.limit.observe({"http://engine": load}, in_flight=66, now=1e9)
        ledger.state.steps_delivered = delivered
        noted = orchestrator.reporter.status().notes
        await broker.close()
        return noted

    found = asyncio.run(noted())
    assert len(found) == notes
    assert all("34 requests waited in the engine's queue" in note for note in found)


def test_a_step_whose_policy_failed_is_noted_in_the_status(tmp_path: Path, ledger: Ledger) -> None:
    config = configured(run_dir=tmp_path)

    async def noted() -> list[str]:
        broker = Broker(config.redis_url)
        orchestrator = orchestrating(config, ledger, broker)
        batch = ledger.compose(0, [admitted(ledger, policy_error="timeout: 5 s")])
        orchestrator.metrics.measure(batch, [], await orchestrator.metrics.of_rollouts(batch))
        noted = orchestrator.reporter.status().notes
        await broker.close()
        return noted

    (note,) = asyncio.run(noted())
    assert note.startswith("4 of 4 rollouts of step 0 ended with a failure of the policy")

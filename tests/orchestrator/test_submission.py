"""Jobs between waiting and published."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.ledgers import admitted, configured, generated, pipeline_of, replies_of, reply_to, unattended
from support.waiting import Clock

from headpond.broker.queues import Queue
from headpond.ledger.states import JobState
from headpond.orchestrator.exchange.gates import Gates
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.submission import AT_ONCE, Submitter
from headpond.processes.embedded_redis import EmbeddedRedis
from headpond.tasks.stage import Outcome
from headpond.tasks.stages.filter import FilterResult


class InterruptedBroker(Broker):
    """Calls `meanwhile` during the first command."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    async def call(self, command: Callable[[Any], Awaitable[Any]]) -> Any:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return await super().call(command)


def play(directory: Path, scene: Callable[[SimpleNamespace], Coroutine[Any, Any, None]]) -> None:
    async def run(server: EmbeddedRedis) -> None:
        config, ledger, gates = configured(run_dir=directory), Ledger(directory / "ledger.sqlite"), Gates()
        broker = InterruptedBroker(server.url)
        pipeline = pipeline_of(config, ledger, gates)
        submitter = Submitter(config, "run", ledger, broker, pipeline, unattended(config))
        replies = replies_of(config, ledger, pipeline)
        try:
            await scene(
                SimpleNamespace(ledger=ledger, gates=gates, broker=broker, submitter=submitter, replies=replies)
            )
        finally:
            ledger.close()
            await broker.close()

    with EmbeddedRedis(directory / "redis") as server:
        asyncio.run(run(server))


def test_a_job_that_is_settled_before_its_slice_is_not_submitted(tmp_path: Path) -> None:
    async def scene(it: SimpleNamespace) -> None:
        groups = [generated(it.ledger) for _ in range(AT_ONCE + 1)]
        jobs = [it.ledger.add_job(f"{group.id}-filter", "filter", group.id) for group in groups]
        for group, job in zip(groups, jobs, strict=True):
            it.ledger.enter(group, "filter")
            it.ledger.submit(job)
            it.ledger.retry(job, losses=1)
        last = groups[-1]

        def a_late_reply_closes_the_last_group() -> None:
            result = FilterResult(dropped={rollout.id: "short" for rollout in last.rollouts})
            it.replies.apply(reply_to(jobs[-1].id, result=result))

        it.broker.meanwhile = a_late_reply_closes_the_last_group
        await it.submitter.submit_waiting()
        assert last.id not in it.ledger.groups
        assert [job.state for job in jobs] == [JobState.SUBMITTED] * AT_ONCE + [JobState.SETTLED]
        assert await it.broker.client.llen(Queue.FILTERING) == AT_ONCE

    play(tmp_path, scene)


def test_a_probe_whose_input_cannot_be_written_is_submitted_later(tmp_path: Path, clock: Clock) -> None:
    async def scene(it: SimpleNamespace) -> None:
        batch = it.ledger.compose(0, [admitted(it.ledger), admitted(it.ledger)])
        job = it.ledger.add_job(batch.job_id(0), "encode", "0")
        it.ledger.submit(job)
        it.ledger.retry(job)
        it.gates.all["encoding"].close(Outcome.UNWRITTEN, job.id, 1, "full")
        clock.now += 60
        blocked = tmp_path / "store" / "plans"
        blocked.parent.mkdir(exist_ok=True)
        blocked.write_text("a file where the plans' folder should be")
        await it.submitter.submit_waiting()
        assert job.state is JobState.WAITING
        assert it.submitter.inputs.writing.text
        blocked.unlink()
        await it.submitter.submit_waiting()
        assert job.state is JobState.SUBMITTED
        assert it.submitter.inputs.writing.text is None

    play(tmp_path, scene)

import asyncio
import json
from pathlib import Path
from typing import Any

from support.ledgers import admitted, configured, encoded, generated
from support.small_disk import LimitedDirectory
from support.waiting import wait_until_async

from orchestrator.broker import Broker
from orchestrator.groups import Groups
from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.records import BatchRecord
from orchestrator.reporting.lags import Lags
from orchestrator.reporting.metrics import Metrics
from orchestrator.sealing import Sealer
from penstock.config import RunConfig
from penstock.ledger.states import GroupState, JobKind
from penstock.runtime.loop_lag import LoopLag


class Run:
    """As much of an orchestrator as delivers steps, over a ledger that outlives it."""

    def __init__(self, directory: Path) -> None:
        self.config: RunConfig = configured(run_dir=directory / "run", ledger_dir=directory)
        self.config.run_dir.mkdir(exist_ok=True)
        self.ledger = Ledger(self.config.ledger_path)
        lags = Lags(Broker("redis://127.0.0.1:1/0"))
        self.metrics = Metrics(self.config, self.ledger, LoopLag(process="orchestrator"), lags)

    def compose(self) -> BatchRecord:
        step = self.ledger.number("steps_delivered")
        self.metrics.composed()
        return self.ledger.compose(step, [admitted(self.ledger), admitted(self.ledger)])

    async def deliver(self, batch: BatchRecord) -> None:
        self.metrics.measure(batch)
        self.ledger.deliver(batch)
        await self.ledger.committed()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.config.run_dir / "metrics.jsonl").read_text().splitlines()]


def test_every_delivered_step_has_its_line(tmp_path: Path) -> None:
    async def main() -> None:
        run = Run(tmp_path)
        for _ in range(3):
            await run.deliver(run.compose())
            assert await run.metrics.write()
        run.ledger.close()
        assert [(line["step"], line["rollouts"], line["reward_mean"]) for line in run.lines()] == [
            (0, 8, 1.5), (1, 8, 1.5), (2, 8, 1.5)]  # fmt: skip
        assert [line["total/rollouts_delivered"] for line in run.lines()] == [8, 16, 24]

    asyncio.run(main())


def test_a_line_that_was_not_written_comes_from_the_ledger(tmp_path: Path) -> None:
    """The first orchestrator is killed between committing and writing; so is the second, after the next step."""

    async def main() -> None:
        for _ in range(2):
            killed = Run(tmp_path)
            await killed.deliver(killed.compose())
            killed.ledger.close()
        resumed = Run(tmp_path)
        assert resumed.metrics.last["step"] == 1
        await resumed.metrics.write()
        await resumed.metrics.write()
        resumed.ledger.close()
        assert [(line["step"], line["reward_mean"]) for line in resumed.lines()] == [(0, 1.5), (1, 1.5)]

    asyncio.run(main())


def test_a_line_that_was_written_before_the_ledger_knew_is_not_written_again(tmp_path: Path) -> None:
    """Killed between writing and committing: the step is delivered again, from its manifest."""

    async def main() -> None:
        first = Run(tmp_path)
        await first.deliver(first.compose())
        await first.metrics.write()
        batch = first.compose()
        await first.ledger.committed()
        (first.config.run_dir / "metrics.jsonl").open("a").write('{"step":1}\n')
        first.ledger.close()
        resumed = Run(tmp_path)
        await resumed.deliver(resumed.ledger.batches[batch.step])
        await resumed.metrics.write()
        resumed.ledger.close()
        assert [line["step"] for line in resumed.lines()] == [0, 1]

    asyncio.run(main())


def test_a_ledger_that_was_lost_leaves_the_manifests(tmp_path: Path) -> None:
    async def main() -> None:
        lost = Run(tmp_path)
        batch = lost.compose()
        assert await Sealer(lost.config).seal(batch, encoded(lost.config, batch))
        await lost.deliver(batch)
        lost.ledger.close()
        lost.config.ledger_path.unlink()
        rebuilt = Run(tmp_path)
        rebuilt.ledger.set("steps_delivered", 1)
        await rebuilt.metrics.write()
        await rebuilt.deliver(rebuilt.compose())
        await rebuilt.metrics.write()
        rebuilt.ledger.close()
        assert [(line["step"], line["reward_mean"], line["loss_tokens"]) for line in rebuilt.lines()] == [
            (0, 1.5, 20), (1, 1.5, 0)]  # fmt: skip

    asyncio.run(main())


def test_a_line_counts_what_happened_since_the_last_one_also_across_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        first = Run(tmp_path)
        first.ledger.spent(JobKind.ROLLOUT, 2.0)
        first.ledger.spent(JobKind.ROLLOUT, 4.0)
        await first.deliver(first.compose())
        dropped = generated(first.ledger)
        for rollout in dropped.rollouts:
            first.ledger.drop(rollout, "gibberish")
        first.ledger.enter(dropped, GroupState.CLOSED)
        first.ledger.spent(JobKind.ROLLOUT, 1.0)
        await first.ledger.committed()
        first.ledger.close()
        resumed = Run(tmp_path)
        resumed.ledger.spent(JobKind.ROLLOUT, 2.0)
        await resumed.deliver(resumed.compose())
        await resumed.metrics.write()
        resumed.ledger.close()
        before, after = resumed.lines()
        assert [line["time/rollout_mean_s"] for line in (before, after)] == [3.0, 1.5]
        assert [line["time/rollout_max_s"] for line in (before, after)] == [4.0, 2.0]
        assert [line["groups_dropped"] for line in (before, after)] == [0, 1]
        assert after["replaced_share"] == 0.333333
        assert after["filtered_rate/gibberish"] == 0.333333
        assert "filtered_rate/gibberish" not in before

    asyncio.run(main())


def test_a_disk_that_takes_nothing_is_named_and_tried_again(tmp_path: Path) -> None:
    async def main() -> None:
        run = Run(tmp_path)
        run.config.run_dir.joinpath("metrics.jsonl").touch()
        writing = asyncio.create_task(run.metrics.run())
        with LimitedDirectory(tmp_path).full(0, "run"):
            await run.deliver(run.compose())
            trouble = await wait_until_async(lambda: run.metrics.trouble, what="the trouble to be named")
            assert trouble.endswith("metrics.jsonl cannot be written (Not a directory): make room or mend its disk")
            await run.deliver(run.compose())
        await wait_until_async(lambda: not run.metrics.trouble, what="the next try")
        assert [line["step"] for line in run.lines()] == [0, 1]
        writing.cancel()
        run.ledger.close()

    asyncio.run(main())


def test_groups_are_counted_by_how_they_were_solved_before_a_filter_drops_them(ledger: Ledger) -> None:
    stages = Groups(configured(), ledger, None)  # type: ignore[arg-type]
    group = generated(ledger)
    stages._collect(group)  # pyright: ignore[reportPrivateUsage]
    assert group.state is GroupState.FILTERING
    assert ledger.number("solved_mixed:noop") == 1

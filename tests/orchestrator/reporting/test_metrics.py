import asyncio
import json
import re
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.ledgers import admitted, configured, encoded, generated, pipeline_of
from support.small_disk import LimitedDirectory
from support.waiting import wait_until_async

from headpond.config import RunConfig
from headpond.event_loop.loop_lag import LoopLag
from headpond.ledger.states import GroupState
from headpond.orchestrator.duties.slices import repeat
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.orchestrator.ledger import rebuild
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import BatchRecord
from headpond.orchestrator.planning.composer import Sealer
from headpond.orchestrator.reporting import metrics
from headpond.orchestrator.reporting.metrics import TAIL_BYTES, LagPoller, LinesFile, Metrics, dumps


class Run:
    """The part of an orchestrator that delivers steps; a second one over the same directory resumes it."""

    def __init__(self, directory: Path) -> None:
        self.config: RunConfig = configured(run_dir=directory / "run", ledger_dir=directory)
        self.config.run_dir.mkdir(exist_ok=True)
        self.ledger = Ledger(self.config.ledger_path)
        lags = LagPoller(Broker("redis://127.0.0.1:1/0"), own="orchestrator")
        self.metrics = Metrics(self.config, self.ledger, LoopLag(process="orchestrator"), lags)

    def compose(self, *, policy_error: str | None = None) -> BatchRecord:
        """`policy_error`: of every rollout of the second group."""
        step = self.ledger.state.steps_delivered
        self.metrics.composed()
        groups = [admitted(self.ledger), admitted(self.ledger, policy_error=policy_error)]
        return self.ledger.compose(step, groups)

    async def deliver(self, batch: BatchRecord) -> None:
        self.metrics.measure(batch, [], await self.metrics.of_rollouts(batch))
        self.ledger.deliver(batch)
        await self.ledger.committed()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.config.run_dir / "metrics.jsonl").read_text().splitlines()]


def test_every_delivered_step_has_its_line(tmp_path: Path) -> None:
    async def main() -> None:
        run = Run(tmp_path)
        for _ in range(3):
            await run.deliver(run.compose())
            await run.metrics.write()
        run.ledger.close()
        assert [(line["step"], line["rollouts"], line["reward_mean"]) for line in run.lines()] == [
            (0, 8, 1.5), (1, 8, 1.5), (2, 8, 1.5)]  # fmt: skip
        assert [line["total/rollouts_delivered"] for line in run.lines()] == [8, 16, 24]

    asyncio.run(main())


def test_a_step_whose_policy_failed_in_half_of_the_rollouts_is_noted_until_the_next_one(tmp_path: Path) -> None:
    async def main() -> None:
        run = Run(tmp_path)
        await run.deliver(run.compose())
        assert run.metrics.notes() == []
        batch = run.compose(policy_error="no number in 'My secret is 7'")
        await run.deliver(batch)
        run.ledger.close()
        noted = "4 of 8 rollouts of step 1 ended with a failure of the policy, such as a time-out: `headpond why {} {}`"
        (note,) = run.metrics.notes()
        assert note.startswith(noted.format(run.config.run_dir, f"{batch.groups[1].id}-0"))
        assert "secret" not in note, "the policy's own words are not for a status"
        resumed = Run(tmp_path)
        (note,) = resumed.metrics.notes()
        assert note.startswith(noted.format(run.config.run_dir, "ROLLOUT"))
        await resumed.deliver(resumed.compose())
        assert resumed.metrics.notes() == []
        resumed.ledger.close()

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


def test_a_line_written_before_its_commit_is_not_written_again(tmp_path: Path) -> None:
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


def test_the_lines_of_a_lost_ledger_come_from_the_manifests(tmp_path: Path) -> None:
    async def main() -> None:
        lost = Run(tmp_path)
        batch = lost.compose()
        assert await Sealer(lost.config).seal(batch, encoded(lost.config, batch))
        await lost.deliver(batch)
        lost.ledger.close()
        lost.config.ledger_path.unlink()
        rebuilt = Run(tmp_path)
        rebuilt.ledger.state.steps_delivered = 1
        await rebuilt.metrics.write()
        await rebuilt.deliver(rebuilt.compose())
        await rebuilt.metrics.write()
        rebuilt.ledger.close()
        assert [(line["step"], line["reward_mean"], line["loss_tokens"]) for line in rebuilt.lines()] == [
            (0, 1.5, 20), (1, 1.5, 0)]  # fmt: skip

    asyncio.run(main())


def test_a_line_counts_since_the_last_one_across_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        first = Run(tmp_path)
        first.ledger.state.stages["play"].settle(2.0)
        first.ledger.state.stages["play"].settle(4.0)
        await first.deliver(first.compose())
        dropped = generated(first.ledger)
        for rollout in dropped.rollouts:
            first.ledger.drop(rollout, "gibberish")
        first.ledger.enter(dropped, GroupState.CLOSED)
        first.ledger.state.stages["play"].settle(1.0)
        await first.ledger.committed()
        first.ledger.close()
        resumed = Run(tmp_path)
        resumed.ledger.state.stages["play"].settle(2.0)
        await resumed.deliver(resumed.compose())
        await resumed.metrics.write()
        resumed.ledger.close()
        before, after = resumed.lines()
        assert [line["time/play_mean_s"] for line in (before, after)] == [3.0, 1.5]
        assert [line["time/play_max_s"] for line in (before, after)] == [4.0, 2.0]
        assert [line["groups_dropped"] for line in (before, after)] == [0, 1]
        assert after["replaced_share"] == 0.333333
        assert after["filtered_rate/gibberish"] == 0.333333
        assert "filtered_rate/gibberish" not in before

    asyncio.run(main())


def test_every_evaluation_has_one_line_across_a_kill_and_a_lost_ledger(tmp_path: Path) -> None:
    async def ended(run: Run) -> None:
        """An evaluation ends, and the run is killed after its line is written."""
        state = run.ledger.state
        state.evaluations_finished += 1
        number = state.evaluations_finished
        state.evaluation_lines[str(number)].line = dumps({"evaluation": number, "reward_mean": number})
        await run.ledger.committed()
        await run.metrics.write()
        run.ledger.close()

    def lines() -> list[int]:
        text = (tmp_path / "run" / "evaluations.jsonl").read_text()
        return [json.loads(line)["evaluation"] for line in text.splitlines()]

    async def main() -> None:
        await ended(Run(tmp_path))
        assert lines() == [1]
        resumed = Run(tmp_path)
        assert list(resumed.ledger.state.evaluation_lines) == ["1"], "the kill came before the commit"
        await ended(resumed)
        assert lines() == [1, 2]
        resumed.config.ledger_path.unlink()
        (tmp_path / "run" / "store" / "rollouts" / "x").mkdir(parents=True)
        rebuild.rebuild_if_lost(resumed.config)
        await ended(Run(tmp_path))
        assert lines() == [1, 2, 3]

    asyncio.run(main())


def test_an_unwritable_file_is_reported_and_tried_again(tmp_path: Path) -> None:
    async def main() -> None:
        run = Run(tmp_path)
        run.config.run_dir.joinpath("metrics.jsonl").touch()
        writing = asyncio.create_task(repeat(run.metrics.write, 0.1))
        with LimitedDirectory(tmp_path).full(0, "run"):
            await run.deliver(run.compose())
            trouble = await wait_until_async(lambda: run.metrics.writing.text, what="the trouble to be reported")
            assert re.search(r"metrics\.jsonl .*Not a directory.*free space", trouble)
            await run.deliver(run.compose())
        await wait_until_async(lambda: not run.metrics.writing.text, what="the next try")
        assert [line["step"] for line in run.lines()] == [0, 1]
        writing.cancel()
        run.ledger.close()

    asyncio.run(main())


def steps_file(directory: Path) -> LinesFile:
    """Without manifests."""
    return LinesFile(directory / "metrics.jsonl", "step", lambda step: dumps({"step": step}))


def lines_of(directory: Path) -> dict[str, list[int]]:
    """File -> the steps of its lines."""
    files = sorted(directory.glob("metrics*.jsonl"))
    return {file.name: [json.loads(line)["step"] for line in file.read_text().splitlines()] for file in files}


def test_a_full_file_is_renamed_and_the_oldest_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lines fill a file."""
    monkeypatch.setattr(metrics, "FULL_BYTES", 2 * len('{"step":0}\n'))
    for delivered in range(1, 10):
        steps_file(tmp_path).complete({}, until=delivered)
    assert lines_of(tmp_path) == {
        "metrics.jsonl": [8],
        "metrics.1.jsonl": [6, 7],
        "metrics.2.jsonl": [4, 5],
        "metrics.3.jsonl": [2, 3],
    }


@pytest.mark.parametrize("renames", [1, 2, 3])
def test_a_kill_between_two_renames_loses_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    monkeypatch.setattr(metrics, "FULL_BYTES", 1)
    file = steps_file(tmp_path)
    for delivered in range(1, 4):
        file.complete({}, until=delivered)
    for number in (2, 1, 0)[:renames]:
        older = tmp_path / (f"metrics.{number}.jsonl" if number else "metrics.jsonl")
        older.rename(tmp_path / f"metrics.{number + 1}.jsonl")
    (tmp_path / "metrics.jsonl").open("a").write('{"step":')
    file.complete({}, until=4)
    assert lines_of(tmp_path) == {
        "metrics.jsonl": [3],
        "metrics.1.jsonl": [2],
        "metrics.2.jsonl": [1],
        "metrics.3.jsonl": [0],
    }


def test_lines_that_cannot_be_written_for_long_fill_neither_memory_nor_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "UNWRITTEN_MOST", 2)

    async def main() -> None:
        run = Run(tmp_path)
        for _ in range(4):
            await run.deliver(run.compose())
        unwritten = [row.line for row in run.ledger.state.metrics_lines.values()]
        assert [json.loads(line)["step"] for line in unwritten] == [2, 3]
        await run.metrics.write()
        run.ledger.close()
        assert [line["step"] for line in run.lines()] == [0, 1, 2, 3]
        assert ["reward_mean" in line for line in run.lines()] == [False, False, True, True]

    asyncio.run(main())


def test_solved_groups_are_counted_before_filters(ledger: Ledger) -> None:
    group = generated(ledger)
    pipeline_of(configured(), ledger).advance(group)
    assert group.state == "filter"
    assert ledger.state.environments["noop"].solved["mixed"] == 1


@pytest.fixture
def file(tmp_path: Path) -> LinesFile:
    return steps_file(tmp_path)


def line(step: int, **values: float) -> str:
    return dumps({"step": step, "reward_mean": 0.5, **values})


def steps(file: LinesFile) -> list[int]:
    text = file.path.read_text()
    assert not text or text.endswith("\n")
    return [json.loads(each)["step"] for each in text.splitlines()]


def test_lines_are_appended_in_the_order_of_steps(file: LinesFile) -> None:
    file.complete({}, until=0)
    assert steps(file) == []
    file.complete({0: line(0)}, until=1)
    file.complete({1: line(1), 2: line(2)}, until=3)
    assert steps(file) == [0, 1, 2]


def test_existing_lines_are_not_written_again(file: LinesFile) -> None:
    file.complete({0: line(0)}, until=1)
    file.complete({0: line(0, reward_max=1.0), 1: line(1)}, until=2)
    file.complete({0: line(0), 1: line(1)}, until=2)
    assert steps(file) == [0, 1]
    assert "reward_max" not in file.path.read_text()


def test_concurrent_writes_append_every_line_once(file: LinesFile) -> None:
    """An attempt whose caller was cancelled continues in its thread."""
    lines = {step: line(step) for step in range(50)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda delivered: file.complete(lines, until=delivered), [10, 50, 20, 50, 30, 40, 50, 5]))
    assert steps(file) == list(range(50))


@pytest.mark.parametrize("rest", [b'{"step":2,"rew', b'{"step":2}', b"\0\0\0\0\n", b"{}\n", b"[2]\n\n", b"\xff\n{"])
def test_a_partial_last_line_is_replaced(file: LinesFile, rest: bytes) -> None:
    file.complete({0: line(0), 1: line(1)}, until=2)
    with file.path.open("ab") as torn:
        torn.write(rest)
    file.complete({2: line(2), 3: line(3)}, until=4)
    assert steps(file) == [0, 1, 2, 3]


def test_a_long_file_is_read_from_its_end(file: LinesFile) -> None:
    wide = {f"key_{number}": 0.0 for number in range(1000)}
    lines = {step: line(step, **wide) for step in range(2 * TAIL_BYTES // len(line(0, **wide)))}
    file.complete(lines, until=len(lines))
    with file.path.open("ab") as torn:
        torn.write(b"{")
    file.complete({}, until=len(lines) + 1)
    assert steps(file) == list(range(len(lines) + 1))


def test_the_next_write_completes_an_interrupted_one(file: LinesFile) -> None:
    file.complete({0: line(0)}, until=1)
    size, (soft, hard) = file.path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 8, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            file.complete({1: line(1)}, until=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.path.stat().st_size == size + 8
    file.complete({1: line(1)}, until=2)
    assert steps(file) == [0, 1]


def test_a_step_without_line_and_manifest_has_a_line_with_its_number(file: LinesFile) -> None:
    file.complete({1: line(1)}, until=2)
    assert file.path.read_text().splitlines() == ['{"step":0}', line(1)]


def test_numbers_have_six_digits_and_integers_stay_integers() -> None:
    assert (
        dumps({"step": 1234567890, "mean": 1 / 3, "tiny": 1.5e-9})
        == '{"step":1234567890,"mean":0.333333,"tiny":1.5e-9}'
    )

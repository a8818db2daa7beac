"""Examples that a sampler draws in advance: jobs, states and groups in the ledger."""

import asyncio
from pathlib import Path
from typing import Any

from support.ledgers import configured, generated

from headpond.ledger.states import JobKind, JobState
from headpond.messages import DrawResult
from headpond.orchestrator.examples.choice import DRAWN_LEAST, HISTORY_MOST, Examples
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.records import GroupRecord, JobRecord


def sampled(ledger: Ledger, *, size: int = 100, **settings: Any) -> Examples:
    ledger.set("examples:noop", size)
    environment = {"use": "noop", "sampler": "my_package:Mine"} | settings
    return Examples(configured(environments={"noop": environment}), ledger)


def draw_job(ledger: Ledger) -> JobRecord:
    (job,) = [job for job in ledger.jobs.values() if job.kind is JobKind.DRAW]
    return job


def drawn(ledger: Ledger, examples: Examples, *numbers: int, state: str = "{}") -> None:
    """The reply of the open draw."""
    ledger.end(draw_job(ledger), JobState.SETTLED)
    examples.settle("noop", DrawResult(examples=numbers, state=state))


def group(ledger: Ledger, example: int) -> GroupRecord:
    made = generated(ledger, size=2)
    made.example = example
    return made


def test_examples_are_drawn_a_step_in_advance(ledger: Ledger) -> None:
    examples = sampled(ledger)
    assert examples.ready("noop") == 0
    examples.draw(40)
    examples.draw(40)
    inputs = examples.draw_inputs(draw_job(ledger))
    assert (inputs.size, inputs.count, inputs.played, inputs.state) == (100, 40, [], None)
    drawn(ledger, examples, *range(40))
    examples.draw(40)
    assert not [job for job in ledger.jobs.values() if job.kind is JobKind.DRAW]
    assert [examples.take("noop") for _ in range(3)] == [0, 1, 2]
    examples.draw(40)
    drawn(ledger, examples, 7, 7)
    assert examples.ready("noop") == 39
    assert [examples.take("noop") for _ in range(39)] == [*range(3, 40), 7, 7]


def test_a_small_step_is_drawn_for_in_larger_pieces(ledger: Ledger) -> None:
    examples = sampled(ledger)
    examples.draw(2)
    assert examples.draw_inputs(draw_job(ledger)).count == DRAWN_LEAST


def test_nothing_is_drawn_before_the_survey_nor_beyond_the_last_epoch(ledger: Ledger) -> None:
    examples = sampled(ledger, size=0, epochs=2)
    examples.draw(40)
    assert not ledger.jobs
    ledger.set("examples:noop", 10)
    examples.draw(40)
    assert examples.draw_inputs(draw_job(ledger)).count == 20
    drawn(ledger, examples, *[3] * 20)
    assert {examples.take("noop") for _ in range(20)} == {3}
    examples.draw(40)
    assert examples.used_up("noop")
    assert not [job for job in ledger.jobs.values() if job.kind is JobKind.DRAW]


def test_a_sampler_that_draws_nothing_ends_its_data_until_the_run_is_resumed(ledger: Ledger) -> None:
    examples = sampled(ledger)
    examples.draw(20)
    drawn(ledger, examples, 1)
    examples.draw(20)
    drawn(ledger, examples)
    assert not examples.used_up("noop")
    examples.take("noop")
    assert examples.used_up("noop")
    examples.draw(20)
    assert not [job for job in ledger.jobs.values() if job.kind is JobKind.DRAW]
    examples.resume()
    examples.draw(20)
    draw_job(ledger)


def test_the_next_draw_is_told_of_every_group_that_ended(ledger: Ledger) -> None:
    examples = sampled(ledger)
    examples.played(group(ledger, 5))
    examples.draw(20)
    examples.played(group(ledger, 6), "zero_variance")  # too late for the open draw
    inputs = examples.draw_inputs(draw_job(ledger))
    assert [(each.example, each.rewards, each.dropped) for each in inputs.played] == [(5, (0.0, 1.0), None)]
    drawn(ledger, examples, 1, state="after one")
    examples.draw(20)
    inputs = examples.draw_inputs(draw_job(ledger))
    assert [(each.example, each.dropped) for each in inputs.played] == [(6, "zero_variance")]
    assert inputs.state == "after one"


def test_groups_beyond_the_history_are_forgotten(ledger: Ledger) -> None:
    examples, played = sampled(ledger), group(ledger, 0)
    for example in range(HISTORY_MOST + 5):
        played.example = example
        examples.played(played)
    examples.draw(20)
    told = [each.example for each in examples.draw_inputs(draw_job(ledger)).played]
    assert told == list(range(5, HISTORY_MOST + 5))
    examples.played(played)  # overwrites the oldest that the open draw was asked with
    assert len(examples.draw_inputs(draw_job(ledger)).played) == HISTORY_MOST - 1


def test_a_killed_run_has_what_was_drawn_and_repeats_an_open_draw(tmp_path: Path) -> None:
    async def begin() -> None:
        ledger = Ledger(tmp_path / "killed.sqlite")
        examples = sampled(ledger)
        examples.draw(20)
        drawn(ledger, examples, 4, 5, 6, state="after one")
        examples.played(group(ledger, 4))
        assert examples.take("noop") == 4
        examples.draw(20)
        await ledger.committed()
        ledger.close()

    asyncio.run(begin())
    ledger = Ledger(tmp_path / "killed.sqlite")
    examples = sampled(ledger)
    examples.resume()
    inputs = examples.draw_inputs(draw_job(ledger))
    assert ([each.example for each in inputs.played], inputs.count, inputs.state) == ([4], 20, "after one")
    drawn(ledger, examples, 9)
    assert [examples.take("noop") for _ in range(3)] == [5, 6, 9]
    ledger.close()


def test_examples_outside_the_data_set_do_not_answer_a_draw(ledger: Ledger) -> None:
    examples = sampled(ledger)
    assert examples.fits("noop", DrawResult(examples=(0, 99), state=""))
    assert not examples.fits("noop", DrawResult(examples=(100,), state=""))
    assert not examples.fits("noop", DrawResult(examples=(-1,), state=""))

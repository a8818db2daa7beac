"""Examples that a sampler draws in advance: jobs, states and groups in the ledger."""

import asyncio
from pathlib import Path
from typing import Any

from support.ledgers import configured, generated, pipeline_of, reply_to

from headpond.ledger.states import JobState
from headpond.orchestrator.examples.choice import Examples
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import GroupRecord, JobRecord
from headpond.orchestrator.stages.draw import DRAWN_LEAST, HISTORY_MOST
from headpond.tasks.stages.draw import DrawInputs, DrawResult


class Sampled(Examples):
    """The examples of an environment with a sampler, and its draws."""

    def __init__(self, ledger: Ledger, *, size: int = 100, **settings: Any) -> None:
        ledger.state.environments["noop"].examples = size
        environment = {"use": "noop", "sampler": "my_package:Mine"} | settings
        config = configured(environments={"noop": environment})
        super().__init__(config, ledger)
        self.ledger = ledger
        self.draw = pipeline_of(config, ledger).draw

    def begin(self, groups_per_step: int) -> None:
        self.draw.begin(lambda: groups_per_step)

    def inputs(self) -> DrawInputs:
        """Of the open draw."""
        return asyncio.run(self.draw.inputs(draw_job(self.ledger)))


def draw_job(ledger: Ledger) -> JobRecord:
    (job,) = [job for job in ledger.jobs.values() if job.stage == "draw"]
    return job


def drawn(ledger: Ledger, examples: Sampled, *numbers: int, state: str = "{}") -> None:
    """The reply of the open draw."""
    job, result = draw_job(ledger), DrawResult(examples=numbers, state=state)
    ledger.end(job, JobState.SETTLED)
    examples.draw.settled(job, result, reply_to(job.id, result=result))


def group(ledger: Ledger, example: int) -> GroupRecord:
    made = generated(ledger, size=2)
    made.example = example
    return made


def test_examples_are_drawn_a_step_in_advance(ledger: Ledger) -> None:
    examples = Sampled(ledger)
    assert examples.ready("noop") == 0
    examples.begin(40)
    examples.begin(40)
    inputs = examples.inputs()
    assert (inputs.size, inputs.count, inputs.played, inputs.state) == (100, 40, [], None)
    drawn(ledger, examples, *range(40))
    examples.begin(40)
    assert not [job for job in ledger.jobs.values() if job.stage == "draw"]
    assert [examples.take("noop") for _ in range(3)] == [0, 1, 2]
    examples.begin(40)
    drawn(ledger, examples, 7, 7)
    assert examples.ready("noop") == 39
    assert [examples.take("noop") for _ in range(39)] == [*range(3, 40), 7, 7]


def test_a_small_step_is_drawn_for_in_larger_pieces(ledger: Ledger) -> None:
    examples = Sampled(ledger)
    examples.begin(2)
    assert examples.inputs().count == DRAWN_LEAST


def test_nothing_is_drawn_before_the_survey_nor_beyond_the_last_epoch(ledger: Ledger) -> None:
    examples = Sampled(ledger, size=0, epochs=2)
    examples.begin(40)
    assert not ledger.jobs
    ledger.state.environments["noop"].examples = 10
    examples.begin(40)
    assert examples.inputs().count == 20
    drawn(ledger, examples, *[3] * 20)
    assert {examples.take("noop") for _ in range(20)} == {3}
    examples.begin(40)
    assert examples.used_up("noop")
    assert not [job for job in ledger.jobs.values() if job.stage == "draw"]


def test_a_sampler_that_draws_nothing_ends_its_data_until_the_run_is_resumed(ledger: Ledger) -> None:
    examples = Sampled(ledger)
    examples.begin(20)
    drawn(ledger, examples, 1)
    examples.begin(20)
    drawn(ledger, examples)
    assert not examples.used_up("noop")
    examples.take("noop")
    assert examples.used_up("noop")
    examples.begin(20)
    assert not [job for job in ledger.jobs.values() if job.stage == "draw"]
    examples.draw.resume()
    examples.begin(20)
    draw_job(ledger)


def test_the_next_draw_is_told_of_every_group_that_ended(ledger: Ledger) -> None:
    examples = Sampled(ledger)
    examples.draw.group_ended(group(ledger, 5))
    examples.begin(20)
    examples.draw.group_ended(group(ledger, 6), "zero_variance")  # too late for the open draw
    inputs = examples.inputs()
    assert [(each.example, each.rewards, each.dropped) for each in inputs.played] == [(5, (0.0, 1.0), None)]
    drawn(ledger, examples, 1, state="after one")
    examples.begin(20)
    inputs = examples.inputs()
    assert [(each.example, each.dropped) for each in inputs.played] == [(6, "zero_variance")]
    assert inputs.state == "after one"


def test_groups_beyond_the_history_are_forgotten(ledger: Ledger) -> None:
    examples, played = Sampled(ledger), group(ledger, 0)
    for example in range(HISTORY_MOST + 5):
        played.example = example
        examples.draw.group_ended(played)
    examples.begin(20)
    told = [each.example for each in examples.inputs().played]
    assert told == list(range(5, HISTORY_MOST + 5))
    examples.draw.group_ended(played)  # overwrites the oldest that the open draw was asked with
    assert len(examples.inputs().played) == HISTORY_MOST - 1


def test_a_killed_run_has_what_was_drawn_and_repeats_an_open_draw(tmp_path: Path) -> None:
    async def begin() -> None:
        ledger = Ledger(tmp_path / "killed.sqlite")
        examples = Sampled(ledger)
        examples.begin(20)
        drawn(ledger, examples, 4, 5, 6, state="after one")
        examples.draw.group_ended(group(ledger, 4))
        assert examples.take("noop") == 4
        examples.begin(20)
        await ledger.committed()
        ledger.close()

    asyncio.run(begin())
    ledger = Ledger(tmp_path / "killed.sqlite")
    examples = Sampled(ledger)
    examples.draw.resume()
    inputs = examples.inputs()
    assert ([each.example for each in inputs.played], inputs.count, inputs.state) == ([4], 20, "after one")
    drawn(ledger, examples, 9)
    assert [examples.take("noop") for _ in range(3)] == [5, 6, 9]
    ledger.close()


def test_examples_outside_the_data_set_do_not_answer_a_draw(ledger: Ledger) -> None:
    examples = Sampled(ledger)
    job = ledger.add_job("d1-noop", "draw", "noop")
    assert examples.draw.fits(job, DrawResult(examples=(0, 99), state=""))
    assert not examples.draw.fits(job, DrawResult(examples=(100,), state=""))
    assert not examples.draw.fits(job, DrawResult(examples=(-1,), state=""))

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import pytest

from headpond.sinks import process
from headpond.sinks.process import POSITIONS, Follower


class Recorded:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[Mapping[str, float]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append(step)
        self.values.append(values)

    def close(self) -> None:
        pass


def append(run_dir: Path, *steps: int, end: str = "\n") -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps({"step": step, "reward_mean": step / 2}) + end for step in steps))


def test_every_line_is_sent_once_when_it_is_complete(tmp_path: Path) -> None:
    sink = Recorded()
    follower = Follower(tmp_path, {"one": sink})
    follower.forward()
    append(tmp_path, 0, 1)
    append(tmp_path, 2, end="")
    follower.forward()
    follower.forward()
    assert sink.steps == [0, 1]
    assert sink.values[1] == {"reward_mean": 0.5}
    append(tmp_path, end="")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("\n")
    follower.forward()
    assert sink.steps == [0, 1, 2]


def test_a_resumed_run_sends_no_step_twice_and_a_new_sink_gets_all(tmp_path: Path) -> None:
    append(tmp_path, 0, 1)
    Follower(tmp_path, {"one": Recorded()}).forward()
    append(tmp_path, 2)
    first, second = Recorded(), Recorded()
    Follower(tmp_path, {"one": first, "two": second}).forward()
    assert (first.steps, second.steps) == ([2], [0, 1, 2])
    assert json.loads((tmp_path / POSITIONS).read_text()) == {"one": 2, "two": 2}


def test_a_file_that_is_full_is_followed_by_another(tmp_path: Path) -> None:
    sink = Recorded()
    follower = Follower(tmp_path, {"one": sink})
    append(tmp_path, 0, 1)
    follower.forward()
    append(tmp_path, 2)
    (tmp_path / "metrics.jsonl").rename(tmp_path / "metrics.1.jsonl")
    follower.forward()
    append(tmp_path, 3)
    follower.forward()
    assert sink.steps == [0, 1, 2, 3], "the last line of the full file too"


def test_files_that_were_full_while_nothing_was_sent_are_sent_before(tmp_path: Path) -> None:
    append(tmp_path, 0, 1)
    Follower(tmp_path, {"one": Recorded()}).forward()
    append(tmp_path, 2)
    (tmp_path / "metrics.jsonl").rename(tmp_path / "metrics.2.jsonl")
    append(tmp_path, 3, 4)
    (tmp_path / "metrics.jsonl").rename(tmp_path / "metrics.1.jsonl")
    first, second = Recorded(), Recorded()
    followers = Follower(tmp_path, {"one": first}), Follower(tmp_path, {"one": second})
    followers[0].forward()  # before the next file begins
    append(tmp_path, 5)
    for follower in followers:
        follower.forward()
    assert (first.steps, second.steps) == ([2, 3, 4, 5], [2, 3, 4, 5])


def test_steps_before_a_number_that_a_killed_orchestrator_left_free_are_sent_too(tmp_path: Path) -> None:
    """It was killed between the renames of metrics.1.jsonl and of metrics.jsonl."""
    append(tmp_path, 0, 1)
    (tmp_path / "metrics.jsonl").rename(tmp_path / "metrics.2.jsonl")
    append(tmp_path, 2, 3)
    sink = Recorded()
    Follower(tmp_path, {"one": sink}).forward()
    assert sink.steps == [0, 1, 2, 3]


def test_full_files_whose_steps_are_sent_are_not_read_again(tmp_path: Path) -> None:
    (tmp_path / "metrics.1.jsonl").write_text("no line of metrics\n")
    (tmp_path / POSITIONS).write_text('{"one": 1}')
    append(tmp_path, 2, 3)
    sink = Recorded()
    Follower(tmp_path, {"one": sink}).forward()
    assert sink.steps == [2, 3]


def test_a_line_that_is_appended_just_before_the_file_is_full_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, appended = Recorded(), process._appended
    follower = Follower(tmp_path, {"one": sink})
    append(tmp_path, 0)
    follower.forward()

    def full_after_reading(file: BinaryIO) -> Iterator[tuple[int, dict[str, float]]]:
        yield from appended(file)
        if not (tmp_path / "metrics.1.jsonl").exists():
            append(tmp_path, 1)
            (tmp_path / "metrics.jsonl").rename(tmp_path / "metrics.1.jsonl")
            append(tmp_path, 2)

    monkeypatch.setattr(process, "_appended", full_after_reading)
    follower.forward()
    follower.forward()
    assert sink.steps == [0, 1, 2]

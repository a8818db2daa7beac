import json
from collections.abc import Mapping
from pathlib import Path

from penstock.runtime.metrics_sinks import POSITIONS, Follower


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

"""The reward of a run, told in a line and drawn with characters."""

import json
from pathlib import Path
from typing import Any

from headpond.commands import curve


def test_a_bar_is_as_high_as_its_reward() -> None:
    lines = curve.drawn([0.0, 0.5, 1.0, 0.2], steps=4)
    width = curve.WIDTH // 4
    assert [line[5:].ljust(curve.WIDTH) for line in lines[: curve.HEIGHT]] == [
        "".join(bar * width for bar in bars) for bars in ("  █ ", "  █ ", " ▄█ ", " ██ ", "▁███")
    ]
    assert [line[:5] for line in lines[: curve.HEIGHT]] == ["1.0 │", "    │", "    │", "    │", "0.0 │"]
    assert lines[-1] == f"    └ step 0 {'─' * (curve.WIDTH - 15)} step 3"


def test_steps_to_come_are_blank_and_many_steps_are_averaged() -> None:
    begun = curve.drawn([1.0], steps=100)[0]
    assert begun == "1.0 │█"
    averaged = curve.drawn([0.0, 1.0] * curve.WIDTH, steps=2 * curve.WIDTH)
    assert {line[5:] for line in averaged[: curve.HEIGHT // 2]} == {""}
    assert averaged[curve.HEIGHT // 2][5:] == "▄" * curve.WIDTH


def test_every_line_fits_a_terminal() -> None:
    assert max(map(len, curve.drawn([0.7] * 24, steps=24))) + 12 <= 80


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert curve.read_lines(path) == []
    path.write_text('{"reward_mean": 0.5, "reward_mean/copy": 0.25, "tokens": 3}\n{"reward_me')
    [line] = curve.read_lines(path)
    assert (line[curve.MEAN], curve.by_environment(line)) == (0.5, {"copy": 0.25})


def written(*lines: dict[str, Any]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_the_rewards_of_the_first_and_the_last_step_are_told(tmp_path: Path) -> None:
    assert curve.first_and_last(tmp_path) is None
    path = tmp_path / "metrics.jsonl"
    path.write_text(written({"step": 0, "reward_mean": 0.22, "reward_mean/sums": 0.22}))
    assert curve.first_and_last(tmp_path) == "0.22 in step 0 (sums 0.22)"
    path.write_text(path.read_text() + written({"step": 1, "reward_mean": 0.9, "reward_mean/sums": 0.9}))
    assert curve.first_and_last(tmp_path) == "0.22 in step 0, 0.90 in step 1 (sums 0.90)"


def test_of_a_long_run_only_the_ends_of_its_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.2.jsonl").write_text(written({"step": 0, "reward_mean": 0.1}, {"step": 1}))
    (tmp_path / "metrics.1.jsonl").write_text(written({"step": 2, "reward_mean": 0.3}))
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.seek(1 << 40)  # a sparse file that no memory would hold
        file.write(b"\n" + written({"step": 3, "reward_mean": 0.5}).encode() + b'{"step": 4, "rew')
    assert curve.first_and_last(tmp_path) == "0.10 in step 0, 0.50 in step 3"


def test_the_last_step_is_told_although_the_newest_file_has_none_yet(tmp_path: Path) -> None:
    """On a full disk, a file begins and its first line cannot be written."""
    lines = {"step": 0, "reward_mean": 0.1}, {"step": 1, "reward_mean": 0.3}
    (tmp_path / "metrics.1.jsonl").write_text(written(*lines))
    assert curve.first_and_last(tmp_path) == "0.10 in step 0, 0.30 in step 1"
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "rew')
    assert curve.first_and_last(tmp_path) == "0.10 in step 0, 0.30 in step 1"


def test_steps_without_a_reward_and_torn_lines_are_passed_over(tmp_path: Path) -> None:
    lost, first, last = {"step": 0}, {"step": 1, "reward_mean": 0.1}, {"step": 2, "reward_mean": 0.2}
    path = tmp_path / "metrics.jsonl"
    path.write_text(written(lost, first) + "\0\0\0\n" + written(last, {"step": 3}))
    assert curve.first_and_last(tmp_path) == "0.10 in step 1, 0.20 in step 2"
    path.write_text(written(lost))
    assert curve.first_and_last(tmp_path) is None

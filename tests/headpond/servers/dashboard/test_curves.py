import json
from pathlib import Path

from headpond.servers.dashboard.curves import Curves


def write(path: Path, *steps: int) -> None:
    path.write_text("".join(json.dumps({"step": step, "reward_mean": step / 10}) + "\n" for step in steps))


def steps_of(curves: Curves) -> list[int]:
    assert curves.read()
    return curves.series([])["steps"]


def test_a_new_file_with_the_inode_of_a_deleted_one_is_read_from_its_beginning(tmp_path: Path) -> None:
    curves, newest = Curves(tmp_path), tmp_path / "metrics.jsonl"
    write(newest, 0, 1, 2)
    assert steps_of(curves) == [0, 1, 2]
    write(newest, 3)  # truncated: the inode stays
    assert steps_of(curves) == [0, 1, 2, 3]


def test_a_read_that_ends_within_a_file_does_not_go_on_to_the_next(tmp_path: Path) -> None:
    """Steps are read in order: those before the newest one would be passed over."""
    write(tmp_path / "metrics.1.jsonl", *range(10))
    write(tmp_path / "metrics.jsonl", 10, 11)
    a_line = (tmp_path / "metrics.jsonl").stat().st_size // 2
    curves = Curves(tmp_path, read_bytes=3 * a_line - 1)
    while not curves.read():
        pass
    assert curves.series([])["steps"] == [*range(12)]


def test_annotations_that_are_not_read_to_their_end_are_left_for_the_next_read(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    lines = [json.dumps({"step": step, "loss_tokens": 1, "entropy": 1.0}) + "\n" for step in range(10)]
    (tmp_path / "trainer" / "annotations.rank_00.jsonl").write_text("".join(lines))
    write(tmp_path / "metrics.jsonl", *range(10))
    curves = Curves(tmp_path, read_bytes=3 * len(lines[0]) - 1)
    while not curves.read():
        pass
    assert curves.series(["trainer/entropy"])["series"] == {"trainer/entropy": [1.0] * 10}

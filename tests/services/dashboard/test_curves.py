import json
from pathlib import Path

from services.dashboard.curves import Curves


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

import json
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.reporting.metrics_file import TAIL_BYTES, MetricsFile, dumps
from penstock.store import Store


@pytest.fixture
def file(tmp_path: Path) -> MetricsFile:
    return MetricsFile(tmp_path / "metrics.jsonl", Store(tmp_path / "store"))


def line(step: int, **values: float) -> str:
    return dumps({"step": step, "reward_mean": 0.5, **values})


def steps(file: MetricsFile) -> list[int]:
    text = file.path.read_text()
    assert not text or text.endswith("\n")
    return [json.loads(each)["step"] for each in text.splitlines()]


def test_lines_are_appended_in_the_order_of_steps(file: MetricsFile) -> None:
    file.complete({}, delivered=0)
    assert steps(file) == []
    file.complete({0: line(0)}, delivered=1)
    file.complete({1: line(1), 2: line(2)}, delivered=3)
    assert steps(file) == [0, 1, 2]


def test_what_is_there_is_not_written_again(file: MetricsFile) -> None:
    file.complete({0: line(0)}, delivered=1)
    file.complete({0: line(0, reward_max=1.0), 1: line(1)}, delivered=2)
    file.complete({0: line(0), 1: line(1)}, delivered=2)
    assert steps(file) == [0, 1]
    assert "reward_max" not in file.path.read_text()


def test_many_tries_at_once_write_every_line_once(file: MetricsFile) -> None:
    """A try whose caller was cancelled goes on in its thread."""
    lines = {step: line(step) for step in range(50)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda delivered: file.complete(lines, delivered=delivered), [10, 50, 20, 50, 30, 40, 50, 5]))
    assert steps(file) == list(range(50))


@pytest.mark.parametrize("rest", [b'{"step":2,"rew', b'{"step":2}', b"\0\0\0\0\n", b"{}\n", b"[2]\n\n", b"\xff\n{"])
def test_a_torn_end_is_mended(file: MetricsFile, rest: bytes) -> None:
    file.complete({0: line(0), 1: line(1)}, delivered=2)
    with file.path.open("ab") as torn:
        torn.write(rest)
    file.complete({2: line(2), 3: line(3)}, delivered=4)
    assert steps(file) == [0, 1, 2, 3]


def test_a_long_file_is_read_from_its_end(file: MetricsFile) -> None:
    wide = {f"key_{number}": 0.0 for number in range(1000)}
    lines = {step: line(step, **wide) for step in range(2 * TAIL_BYTES // len(line(0, **wide)))}
    file.complete(lines, delivered=len(lines))
    with file.path.open("ab") as torn:
        torn.write(b"{")
    file.complete({}, delivered=len(lines) + 1)
    assert steps(file) == list(range(len(lines) + 1))


def test_a_write_that_breaks_off_is_made_good_by_the_next(file: MetricsFile) -> None:
    file.complete({0: line(0)}, delivered=1)
    size, (soft, hard) = file.path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 8, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            file.complete({1: line(1)}, delivered=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.path.stat().st_size == size + 8
    file.complete({1: line(1)}, delivered=2)
    assert steps(file) == [0, 1]


def test_a_step_of_which_nothing_is_left_has_a_line_all_the_same(file: MetricsFile) -> None:
    file.complete({1: line(1)}, delivered=2)
    assert file.path.read_text().splitlines() == ['{"step":0}', line(1)]


def test_numbers_are_short_and_whole_ones_stay_whole() -> None:
    assert (
        dumps({"step": 1234567890, "mean": 1 / 3, "tiny": 1.5e-9})
        == '{"step":1234567890,"mean":0.333333,"tiny":1.5e-9}'
    )

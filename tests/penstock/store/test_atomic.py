import os
from pathlib import Path

import pytest

from penstock.store import atomic


def test_a_file_is_replaced_whole_and_can_be_read_by_others(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    before = os.umask(0o022)
    try:
        atomic.write(path, b"first")
        atomic.write(path, b"second", durable=True)
    finally:
        os.umask(before)
    assert path.read_bytes() == b"second"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_created_once(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    atomic.create(path, b"first")
    with pytest.raises(FileExistsError):
        atomic.create(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("put", [atomic.write, atomic.create])
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, put: object) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        put(tmp_path / "taken", b"content")  # type: ignore[operator]
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_the_rest_of_a_killed_writer_is_swept(tmp_path: Path) -> None:
    for name in (".a.json.0badcafe.tmp", ".b.json.0badcafe.tmp", "a.json", ".hidden"):
        (tmp_path / name).touch()
    atomic.sweep(tmp_path, "a.")
    assert not (tmp_path / ".a.json.0badcafe.tmp").exists()
    atomic.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "a.json"]
    atomic.sweep(tmp_path / "missing")

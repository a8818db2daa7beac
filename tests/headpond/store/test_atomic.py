import os
from contextlib import suppress
from pathlib import Path

import pytest

from headpond.errors import BlobUnwritten
from headpond.store import atomic


def test_a_file_is_replaced_with_the_permissions_of_the_umask(tmp_path: Path) -> None:
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


def test_an_existing_file_is_not_created_again(tmp_path: Path) -> None:
    path = tmp_path / "step" / "manifest.json"
    assert atomic.create_durably(path, b"first")
    assert not atomic.create_durably(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError):
        atomic.write(tmp_path / "taken", b"content")
    with pytest.raises(BlobUnwritten, match=r"taken: Is a directory"):
        atomic.write_durably(tmp_path / "taken", b"content")
    assert not atomic.create_durably(tmp_path / "taken", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_body_that_fails_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(b"before")
    with suppress(KeyboardInterrupt), atomic.replacing(path) as temporary:
        temporary.write_bytes(b"half of it")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_fixed_suffix_overwrites_the_leftover_of_a_killed_writer(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    atomic.temporary_path(path, "rebuilding").write_bytes(b"a leftover")
    with atomic.replacing(path, suffix="rebuilding") as temporary:
        assert not temporary.exists()
        temporary.write_bytes(b"complete")
    assert path.read_bytes() == b"complete"
    assert list(tmp_path.iterdir()) == [path]


def test_replacing_a_file_by_a_link_to_itself_leaves_one_name(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.bin"
    path.write_bytes(b"content")
    with atomic.replacing(path, suffix="tmp") as temporary:
        temporary.hardlink_to(path)
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_of_killed_writers_are_swept(tmp_path: Path) -> None:
    for name in (".a.json.0badcafe.tmp", ".b.json.0badcafe.tmp", "a.json", ".hidden"):
        (tmp_path / name).touch()
    atomic.sweep(tmp_path, "a.")
    assert not (tmp_path / ".a.json.0badcafe.tmp").exists()
    atomic.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "a.json"]
    atomic.sweep(tmp_path / "missing")

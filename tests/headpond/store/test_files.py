import subprocess
import sys
from pathlib import Path

import pytest
from support.stores import directory_store

from headpond.errors import BlobCorrupt, BlobError, BlobMissing, BlobUnwritten
from headpond.store import BlobRef, open_store
from headpond.store.files import FileStore
from headpond.store.parts import HEAD

KEY = "rollouts/r7/1.ab/columns"


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return open_store((tmp_path / "store").as_uri())


def visible(store: FileStore) -> list[str]:
    return sorted(str(path.relative_to(store.root)) for path in store.root.rglob("*") if path.is_file())


def test_keys_through_symbolic_links_are_refused(store: FileStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    ref = store.put("plain", [b"secret"])
    (store.root / "directory").symlink_to(outside)
    (store.root / "file").symlink_to(outside / "secret")
    for key in ("directory/secret", "file"):
        with pytest.raises(BlobError, match="symbolic link"):
            store.open(BlobRef(key=key, size=ref.size, checksum=ref.checksum))
        with pytest.raises(BlobError, match="symbolic link"):
            store.put(key, [b"x"])
    with pytest.raises(BlobError, match="symbolic link"):
        store.sweep("directory", named=())
    assert (outside / "secret").read_bytes() == b"secret"


def test_a_key_below_a_blob_is_missing(store: FileStore) -> None:
    ref = store.put("a", [b"x"])
    with pytest.raises(BlobMissing, match="a/b"):
        store.open(BlobRef(key="a/b", size=1, checksum=ref.checksum))
    store.delete("a/b")
    assert store.size("a/b") is None


FULL_DISK = """
import resource, sys
from headpond.store import open_store
from headpond.errors import BlobUnwritten
store = open_store(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    store.put("a/b", [b"x" * 60_000, b"y" * 60_000])
except BlobUnwritten as error:
    assert not store.path("a/b").exists()
    print(error)
part = store.part("grows", reserve_head=True)
part.append(b"k" * 50_000)
for _ in range(2):
    try:
        part.append(b"lost" * 20_000)
    except BlobUnwritten:
        print("part", part.length, part.path.stat().st_size)
part.append(b"end")
ref = store.commit(part, "grows", head=b"h" * 4096)
assert store.open(ref)[4096:].tobytes() == b"k" * 50_000 + b"end"
"""


def test_a_full_disk_leaves_no_partial_blob(store: FileStore) -> None:
    """The kernel refuses bytes past a limit as it does on a full disk: after writing those that still fit."""
    run = subprocess.run([sys.executable, "-c", FULL_DISK, store.root.as_uri()], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].startswith("cannot write")
    assert "File too large" in lines[0]
    assert lines[1:] == [f"part {HEAD + 50_000} {HEAD + 50_000}"] * 2
    assert visible(store) == ["grows"]


def test_a_store_that_cannot_be_created_is_named_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BlobUnwritten, match=f"cannot write {tmp_path}/file/"):
        directory_store(tmp_path / "file").put("a", [b"x"])


def test_a_directory_in_place_of_a_blob_is_named(store: FileStore) -> None:
    ref = store.put(KEY, [b"x"])
    store.path(KEY).unlink()
    store.path(KEY).mkdir()
    with pytest.raises(BlobCorrupt, match=f"{KEY} is a directory"):
        store.open(ref)


def test_files_that_killed_writers_left_are_removed(store: FileStore) -> None:
    store.write("batches/step_000001/x", b"1")
    temporary = [store.root / "batches/.x.ab.tmp", store.root / "batches/step_000001/.manifest.json.ab.tmp"]
    part = store.part("batches/step_000001/rank")
    for path in temporary:
        path.touch()
    store.tidy("batches")
    assert not [path for path in temporary if path.exists()]
    assert part.path.exists(), "an encoder may still write it"
    store.tidy("plans")

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from support.stores import blob_keys

from penstock.errors import BlobCorrupt, BlobError, BlobMissing, BlobUnwritten, ConfigError
from penstock.store import BlobRef, Store, open_store
from penstock.store.parts import HEAD

KEY = "rollouts/r7/1.ab/columns"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


def visible(store: Store) -> list[str]:
    return sorted(str(path.relative_to(store.root)) for path in store.root.rglob("*") if path.is_file())


@pytest.mark.parametrize("size", [0, 1, HEAD - 1, HEAD, HEAD + 1, 3 * HEAD])
def test_a_blob_is_the_same_for_any_cut_into_pieces(store: Store, size: int) -> None:
    content = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    ref = store.put(KEY, [content.tobytes()])
    pieces = store.put("pieces", np.array_split(content, 7))
    assert (ref.size, ref.key) == (size, KEY)
    assert (pieces.size, pieces.checksum) == (ref.size, ref.checksum)
    opened = store.open(ref)
    assert opened.tobytes() == content.tobytes()
    assert not opened.flags.writeable
    assert visible(store) == ["pieces", KEY]


@pytest.mark.parametrize("url", ["/plain/path", "s3://bucket/x", "file://host/path", "file:relative", ""])
def test_only_a_directory_url_opens_a_store(url: str) -> None:
    with pytest.raises(ConfigError, match="file:///"):
        open_store(url)


def test_a_url_may_quote_its_path(tmp_path: Path) -> None:
    assert open_store((tmp_path / "a b").as_uri()).root == tmp_path / "a b"


NO_KEYS = ["", "/etc/passwd", "/a", "..", "../x", "a/../b", "a//b", "a/", ".hidden", "a/.part", "a\\b", "a\0b", "a b"]


@pytest.mark.parametrize("key", [*NO_KEYS, "é", "a\n", "~root", "a:b", "x" * 201])
def test_a_key_that_is_not_plain_names_is_refused(store: Store, key: str) -> None:
    with pytest.raises(BlobError, match="is not a key"):
        store.put(key, [b"x"])
    with pytest.raises(BlobError, match="is not a key"):
        store.open(BlobRef(key=key, size=1, checksum=""))
    with pytest.raises(BlobError, match="is not a key"):
        store.delete(key)


def test_keys_through_symbolic_links_are_refused(store: Store, tmp_path: Path) -> None:
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


def test_missing_and_damaged_blobs_are_named_by_their_key(store: Store) -> None:
    ref = store.put(KEY, [bytes(range(256)) * 40])
    path = store.root / KEY
    whole = path.read_bytes()
    for position in (0, HEAD - 1, HEAD, len(whole) - 1):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(BlobCorrupt, match=f"blob {KEY} has checksum"):
            store.open(ref)
        assert store.open(ref, verify=False).size == ref.size
    for cut in (whole[:-1], b"", whole + b"x"):
        path.write_bytes(cut)
        with pytest.raises(BlobCorrupt, match=f"blob {KEY} has {len(cut)} bytes"):
            store.open(ref, verify=False)
    path.unlink()
    with pytest.raises(BlobMissing, match=KEY):
        store.open(ref)
    with pytest.raises(BlobMissing, match=KEY):
        store.sync([KEY])
    path.mkdir()
    with pytest.raises(BlobCorrupt, match=KEY):
        store.open(ref)


def test_a_key_below_a_blob_is_missing(store: Store) -> None:
    ref = store.put("a", [b"x"])
    with pytest.raises(BlobMissing, match="a/b"):
        store.open(BlobRef(key="a/b", size=1, checksum=ref.checksum))
    assert not store.delete("a/b")


def test_two_writers_of_one_key_never_mix(store: Store) -> None:
    contents = [bytes([letter]) * 300_000 for letter in range(8)]
    barrier, refs = threading.Barrier(len(contents)), list[BlobRef]()

    def write(content: bytes) -> None:
        barrier.wait()
        refs.append(store.put(KEY, [content[:100_000], content[100_000:]]))

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = (store.root / KEY).read_bytes()
    assert found in contents
    assert visible(store) == [KEY]
    good = [ref for ref in refs if ref.checksum == store.put("again", [found]).checksum]
    assert len(good) == 1
    assert store.open(good[0]).tobytes() == found


def test_an_error_between_pieces_leaves_no_file(store: Store) -> None:
    def pieces():
        yield b"x" * 10_000
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.put(KEY, pieces())
    assert visible(store) == []


FULL_DISK = """
import resource, sys
from penstock.store import open_store
from penstock.errors import BlobUnwritten
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


def test_a_full_disk_leaves_no_partial_blob(store: Store) -> None:
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
        Store(tmp_path / "file").put("a", [b"x"])


def test_a_sweep_removes_unnamed_blobs_and_parts(store: Store) -> None:
    kept = store.put("rollouts/r1/1.aa/columns", [b"1"])
    store.put("rollouts/r1/1.aa/experts", [b"2"])
    store.put("rollouts/r1/2.bb/columns", [b"3"])
    other = store.put("rollouts/r2/1.cc/columns", [b"4"])
    store.part("rollouts/r1/2.bb/experts").append(b"5")
    assert blob_keys(store, "rollouts/r1") == [
        f"rollouts/r1/{name}" for name in ("1.aa/columns", "1.aa/experts", "2.bb/columns")
    ]
    removed = store.sweep("rollouts/r1", named={kept.key})
    assert len(removed) == 3
    assert visible(store) == [kept.key, other.key]
    assert not (store.root / "rollouts/r1/2.bb").exists()
    assert store.sweep("rollouts/r1", named=[]) == [kept.key]
    assert not (store.root / "rollouts/r1").exists()
    assert store.sweep("rollouts/never", named=[]) == []


def test_delete_returns_whether_the_blob_existed(store: Store) -> None:
    ref = store.put(KEY, [b"x"])
    store.sync([ref.key])
    assert store.delete(KEY)
    assert not store.delete(KEY)

"""What every store does, the directory, the one in memory and the example of a user's own alike."""

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headpond.errors import BlobCorrupt, BlobError, BlobMissing
from headpond.store import BlobRef, Store, base, open_store
from headpond.store.parts import HEAD, Part

EXAMPLES = Path(__file__).parents[3] / "examples"
KEY = "rollouts/r7/1.ab/columns"

URLS: dict[str, Callable[[Path], str]] = {
    "file": lambda directory: (directory / "a store").as_uri(),
    "memory": lambda directory: f"memory://{uuid.uuid4()}",
    "sqlite": lambda directory: f"sqlite_store:SqliteStore://{directory}/store.sqlite",
}


@pytest.fixture(params=URLS)
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return open_store(URLS[request.param](tmp_path))


def unfinished(store: Store) -> list[str]:
    """Files of this host that grow."""
    return sorted(path.name for path in store.spool_dir.rglob(".*") if path.name != ".lock")


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
    assert list(store.keys("rollouts")) == [KEY]
    assert unfinished(store) == []


NO_KEYS = ["", "/etc/passwd", "/a", "..", "../x", "a/../b", "a//b", "a/", ".hidden", "a/.part", "a\\b", "a\0b", "a b"]


@pytest.mark.parametrize("key", [*NO_KEYS, "é", "a\n", "~root", "a:b", "x" * 201])
def test_a_key_that_is_not_plain_names_is_refused(store: Store, key: str) -> None:
    ref = BlobRef(key=key, size=1, checksum="")
    for call in (lambda: store.put(key, [b"x"]), lambda: store.open(ref), lambda: store.require(ref)):
        with pytest.raises(BlobError, match="is not a key"):
            call()


def test_written_blobs_are_read_by_range_replaced_and_deleted(store: Store) -> None:
    store.write("a/b", b"0123456789")
    assert store.read("a/b") == b"0123456789"
    assert (store.read("a/b", 3), store.read("a/b", 3, 5), store.read("a/b", 8, 99)) == (b"3456789", b"34", b"89")
    assert store.size("a/b") == 10
    store.write("a/b", memoryview(b"other"))
    assert store.read("a/b") == b"other"
    store.delete("a/b")
    store.delete("a/b")
    assert store.size("a/b") is None
    with pytest.raises(BlobMissing, match="a/b"):
        store.read("a/b")


def test_of_many_creators_of_a_blob_one_succeeds_and_its_content_stays(store: Store) -> None:
    contents = [f"by {number}".encode() for number in range(8)]
    barrier = threading.Barrier(len(contents))

    def create(content: bytes) -> bool:
        barrier.wait()
        return store.create("batches/step_000001/manifest.json", content)

    with ThreadPoolExecutor(len(contents)) as threads:
        created = list(threads.map(create, contents))
    assert sum(created) == 1
    found = store.read("batches/step_000001/manifest.json")
    assert found == contents[created.index(True)]
    assert not store.create("batches/step_000001/manifest.json", found)
    assert not store.create("batches/step_000001/manifest.json", b"other")
    assert store.read("batches/step_000001/manifest.json") == found


def test_keys_are_listed_by_folder(store: Store) -> None:
    keys = ["a/b/c", "a/b/d", "a/e", "a.b/c", "ab", "z"]
    for key in keys:
        store.write(key, b"x")
    assert sorted(store.keys("a")) == ["a/b/c", "a/b/d", "a/e"]
    assert sorted(store.names("a")) == ["b", "e"]
    assert list(store.keys("never")) == []
    assert list(store.names("never")) == []


def test_missing_and_damaged_blobs_are_named_by_their_key(store: Store) -> None:
    ref = store.put(KEY, [bytes(range(256)) * 40])
    whole = store.read(KEY)
    for position in (0, HEAD - 1, HEAD, len(whole) - 1):
        store.write(KEY, whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(BlobCorrupt, match=f"blob {KEY} has checksum"):
            store.open(ref)
        assert store.open(ref, verify=False).size == ref.size
        store.require(ref)
    for cut in (whole[:-1], b"", whole + b"x"):
        store.write(KEY, cut)
        for check in (lambda: store.open(ref, verify=False), lambda: store.require(ref)):
            with pytest.raises(BlobCorrupt, match=f"blob {KEY} has {len(cut)} bytes"):
                check()
    store.delete(KEY)
    for check in (lambda: store.open(ref), lambda: store.require(ref), lambda: store.sync([KEY])):
        with pytest.raises(BlobMissing, match=KEY):
            check()


def test_a_part_is_continued_by_the_next_process_and_taken_back_after_sealing(store: Store) -> None:
    store.keep_spool("server-1")
    left = store.part(KEY, suffix="rows", reserve_head=True)
    left.append(b"kept")
    good = left.length
    left.append(b"torn")
    part = Part.recover(store.part_path(KEY, "rows"), good)
    part.append(b"more")
    length = part.length
    ref = store.commit(part, KEY, head=b"h" * HEAD)
    assert store.open(ref)[HEAD:].tobytes() == b"keptmore"
    assert unfinished(store) == []
    store.take_back(KEY, store.part_path(KEY, "rows"))
    assert store.size(KEY) is None
    again = Part.recover(store.part_path(KEY, "rows"), length)
    assert store.commit(again, KEY, head=b"h" * HEAD) == ref
    store.take_back("rollouts/never", store.part_path("rollouts/never", "rows"))


def test_a_blob_is_exported(store: Store, tmp_path: Path) -> None:
    ref = store.put(KEY, [b"content"])
    store.export(ref.key, tmp_path / "exported")
    assert (tmp_path / "exported").read_bytes() == b"content"


def test_a_sweep_removes_unnamed_blobs_and_parts(store: Store) -> None:
    kept = store.put("rollouts/r1/1.aa/columns", [b"1"])
    store.put("rollouts/r1/1.aa/experts", [b"2"])
    store.put("rollouts/r1/2.bb/columns", [b"3"])
    other = store.put("rollouts/r10/1.cc/columns", [b"4"])
    store.part("rollouts/r1/2.bb/experts").append(b"5")
    unnamed = store.unnamed("rollouts/r1", named={kept.key})
    assert sorted(unnamed) == store.sweep("rollouts/r1", named={kept.key})
    assert len(unnamed) == 3
    assert min(unnamed.values()) > 0
    assert store.unnamed("rollouts/r1", named={kept.key}) == {}
    assert sorted(store.keys("rollouts")) == [kept.key, other.key]
    assert unfinished(store) == []
    assert store.sweep("rollouts/r1", named=[]) == [kept.key]
    assert not (store.spool_dir / "rollouts/r1").exists()
    assert store.sweep("rollouts/never", named=[]) == []


def test_an_error_between_pieces_leaves_nothing(store: Store) -> None:
    def pieces():
        yield b"x" * 10_000
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.put(KEY, pieces())
    assert store.size(KEY) is None
    assert unfinished(store) == []


def test_two_writers_of_one_key_never_mix(store: Store) -> None:
    contents = [bytes([letter]) * 300_000 for letter in range(8)]
    with ThreadPoolExecutor(len(contents)) as threads:
        refs = list(threads.map(lambda content: store.put(KEY, [content[:100_000], content[100_000:]]), contents))
    found = store.read(KEY)
    good = [ref for ref, content in zip(refs, contents, strict=True) if content == found]
    assert len(good) == 1
    assert store.open(good[0]).tobytes() == found


@given(content=st.binary(max_size=300), chunk=st.integers(1, 100))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_download_in_ranges_is_the_blob(store: Store, content: bytes, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "BYTES_PER_READ", chunk)
        assert store.open(store.put(KEY, [content])).tobytes() == content


def test_a_store_is_opened_once_a_process(store: Store) -> None:
    assert open_store(store.url) is store

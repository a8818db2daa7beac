import gc
import resource
from pathlib import Path

import pytest
from support.stores import directory_store

from headpond.errors import BlobCorrupt
from headpond.store.files import FileStore
from headpond.store.parts import HEAD, RESERVED_FROM, Part


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return directory_store(tmp_path)


def test_a_part_is_reset_to_a_mark(store: FileStore) -> None:
    part = store.part("rows", reserve_head=True)
    part.append(b"kept")
    mark = part.mark()
    part.append(b"a much longer piece that is undone")
    part.reset(mark)
    part.append(b", too")
    ref = store.commit(part, "rows", head=b"h" * HEAD)
    assert store.open(ref)[HEAD:].tobytes() == b"kept, too"


def test_a_part_is_continued_by_another_process(store: FileStore) -> None:
    left = store.part("rows", suffix="part", reserve_head=True)
    left.append(b"kept")
    good = left.length
    left.append(b"torn")
    part = Part.recover(store.part_path("rows", "part"), good)
    part.append(b"more")
    ref = store.commit(part, "rows", head=b"h" * HEAD)
    assert store.open(ref)[HEAD:].tobytes() == b"keptmore"


def test_a_part_shorter_than_its_recorded_length_is_refused(store: FileStore) -> None:
    left = store.part("rows", suffix="part", reserve_head=True)
    left.append(b"kept")
    with pytest.raises(BlobCorrupt, match="has only 4100 of the 5000 bytes"):
        Part.recover(left.path, 5000)


def test_more_pieces_than_one_system_call_accepts_are_written(store: FileStore) -> None:
    part = store.part("rows")
    part.append(*(index.to_bytes(2) for index in range(3000)))
    ref = store.commit(part, "rows")
    assert store.open(ref).tobytes() == b"".join(index.to_bytes(2) for index in range(3000))


def test_a_bounded_number_of_descriptors_stays_open(store: FileStore) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    parts = [store.part(f"p{index}") for index in range(200)]
    opened = len(list(Path("/proc/self/fd").iterdir()))  # the test runner has open files too
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 80, hard))
    try:
        for part in parts:
            part.append(b"x")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_committed_discarded_or_collected_part_closes_its_descriptor(store: FileStore) -> None:
    def kept() -> int:
        gc.collect()
        opened = [path for path in Path("/proc/self/fd").iterdir() if path.exists()]
        return sum(path.resolve().name.startswith(".rows") for path in opened)

    committed, discarded, forgotten = (store.part(f"rows{index}") for index in range(3))
    for part in (committed, discarded, forgotten):
        part.append(b"x")
    assert kept() == 3
    store.commit(committed, "rows0")
    discarded.discard()
    del forgotten, part
    assert kept() == 0


def test_unused_reserved_space_is_freed_on_commit(store: FileStore) -> None:
    part, piece = store.part("rows"), b"x" * (RESERVED_FROM // 2)
    for _ in range(4):
        part.append(piece)
    assert part.path.stat().st_size == 4 * len(piece)
    store.commit(part, "rows")
    taken = store.path("rows").stat().st_blocks * 512
    assert taken <= 4 * len(piece) + 4096

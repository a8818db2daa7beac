"""`Store.check` tries the six methods of a store, and names the one that breaks the protocol."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.stores import directory_store

from headpond.errors import BlobError, BlobUnwritten
from headpond.store import open_store
from headpond.store.memory import MemoryStore


def broken(**methods: Callable[..., Any]) -> MemoryStore:
    return type("Bad", (MemoryStore,), methods)("memory://broken")


def raises(*_: Any) -> Any:
    raise KeyError("gone")


def unwritten(*_: Any) -> Any:
    raise BlobUnwritten("no space left")


def keeps_the_first(store: MemoryStore, key: str, content: bytes) -> None:
    if store.size(key) is None:
        MemoryStore.write(store, key, content)


def overwrites(store: MemoryStore, key: str, content: bytes) -> bool:
    store.write(key, content)
    return True


def ignores_the_range(store: MemoryStore, key: str, start: int = 0, stop: int | None = None) -> bytes:
    return MemoryStore.read(store, key)


def begins_with(store: MemoryStore, under: str) -> Iterator[str]:
    return (key for key in MemoryStore.keys(store, under.rpartition("/")[0]) if key.startswith(under))


def empty_if_missing(store: MemoryStore, key: str, start: int = 0, stop: int | None = None) -> bytes:
    return b"" if MemoryStore.size(store, key) is None else MemoryStore.read(store, key, start, stop)


@pytest.mark.parametrize(
    ("method", "replacement", "why"),
    [
        ("size", raises, f"size of a missing key raised KeyError: 'gone' ({__file__}, line "),
        ("size", lambda *_: 0, "size of a missing key returned 0: it must return None"),
        ("create", unwritten, "create of a missing key raised BlobUnwritten: no space left"),
        ("create", lambda *_: None, "create of a missing key returned None: it must return True"),
        ("create", overwrites, "create of a key that is there returned True: it must return False"),
        ("write", keeps_the_first, "read after write returned b'the first': it must return b'the second one'"),
        ("read", ignores_the_range, "read of bytes 2 to 5 returned b'the first': it must return b'e f'"),
        ("read", lambda self, key: b"the first", "read of bytes 2 to 5 raised TypeError"),
        ("read", empty_if_missing, "read of a missing key returned b'': it must raise BlobMissing"),
        ("keys", begins_with, "which no slash follows returned ['probe/"),
        ("keys", lambda *_: iter(()), "returned []: it must return ['probe/"),
        ("delete", raises, "delete of a key that is there raised KeyError"),
    ],
)
def test_the_method_that_breaks_the_protocol_is_named(method: str, replacement: Callable[..., Any], why: str) -> None:
    with pytest.raises(BlobError, match=r"^Bad\..*" + re.escape(why)):
        broken(**{method: replacement}).check()


def test_a_store_that_keeps_the_protocol_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples")
    for url in ("memory://whole", f"sqlite_store:SqliteStore://{tmp_path}/blobs.sqlite"):
        store = open_store(url)
        store.check()
        store.check()
        assert list(store.keys("probe")) == []


def test_the_directory_is_only_created(tmp_path: Path) -> None:
    directory_store(tmp_path / "store").check()
    assert list(tmp_path.rglob("*")) == [tmp_path / "store"]

"""A full disk or quota is the same error at every call that writes: network file systems report it at any of them."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.stores import directory_store

from headpond.errors import BlobUnwritten
from headpond.store import atomic
from headpond.store.files import FileStore
from headpond.store.parts import KEPT_OPEN

ERRORS = [errno.ENOSPC, errno.EDQUOT]


def put(store: FileStore) -> None:
    store.put("a/b", [b"content"])


def put_beyond_kept(store: FileStore) -> None:
    """A part whose descriptor is closed after every append."""
    kept = 0
    while KEPT_OPEN.acquire(blocking=False):
        kept += 1
    try:
        put(store)
    finally:
        for _ in range(kept):
            KEPT_OPEN.release()


def sync(store: FileStore) -> None:
    store.sync(["there"])


def write_durably(store: FileStore) -> None:
    atomic.write_durably(store.root / "a" / "b", b"content")


def create_durably(store: FileStore) -> None:
    atomic.create_durably(store.root / "a" / "b", b"content")


def fail_in_store(monkeypatch: pytest.MonkeyPatch, store: FileStore, call: str, code: int, skip: int) -> list[str]:
    """Let `os.<call>` fail for the store's files, after it has done its work, except for the first `skip` calls.
    Returns the list of failed calls."""
    real, failed = getattr(os, call), list[str]()

    def of_store(argument: Any) -> bool:
        path = Path(f"/proc/self/fd/{argument}").readlink() if isinstance(argument, int) else Path(argument)
        return path.is_relative_to(store.root)

    def fails(argument: Any, *more: Any, **options: Any) -> Any:
        nonlocal skip
        concerned = of_store(argument)
        result = real(argument, *more, **options)
        skip -= concerned
        if concerned and skip < 0:
            failed.append(call)
            raise OSError(code, os.strerror(code))
        return result

    monkeypatch.setattr(os, call, fails)
    return failed


@pytest.mark.parametrize("code", ERRORS)
@pytest.mark.parametrize(
    ("call", "body", "skip"),
    [
        ("pwritev", put, 0),
        ("close", put, 0),
        ("close", put, 1),
        ("close", put_beyond_kept, 1),
        ("replace", put, 0),
        ("fsync", sync, 0),
        ("close", sync, 0),
        ("fsync", write_durably, 0),
        ("replace", write_durably, 0),
        ("fsync", create_durably, 0),
        ("link", create_durably, 0),
    ],
)
def test_every_call_that_writes_may_find_the_disk_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, body: Callable[[FileStore], None], skip: int, code: int
) -> None:
    store = directory_store(tmp_path)
    store.put("there", [b"content"])
    free = KEPT_OPEN._value
    with monkeypatch.context() as patched:
        failed = fail_in_store(patched, store, call, code, skip)
        with pytest.raises(BlobUnwritten, match=os.strerror(code)):
            body(store)
        assert failed
    assert KEPT_OPEN._value == free
    assert not list(tmp_path.rglob(".*"))

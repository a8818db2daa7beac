import sqlite3
import threading
from pathlib import Path

import pytest

from headpond.store import open_store

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_process_that_creates_the_file_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    file = tmp_path / "blobs.sqlite"
    other = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    threading.Timer(0.2, other.close).start()
    store = open_store(f"sqlite_store:SqliteStore://{file}")
    store.write("a/b", b"content")
    assert store.read("a/b") == b"content"

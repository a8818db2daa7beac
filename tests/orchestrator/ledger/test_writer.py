import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.small_disk import LimitedDirectory
from support.waiting import HANG_S, wait_until

from headpond.ledger.schema import reading
from headpond.orchestrator.ledger import writer as module
from headpond.orchestrator.ledger.writer import Changes, Writer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def writer(path: Path) -> Iterator[Writer]:
    writer = Writer(path)
    yield writer
    writer.close()


def ignore(error: Exception | None) -> None:
    assert error is None


def set_by(event: threading.Event) -> Callable[[Exception | None], None]:
    return lambda error: event.set() if error is None else None


def count(name: str, value: int) -> Changes:
    return {"state": [("counts", name, 0, value)]}


def events(number: int) -> Changes:
    return {"events": [(0.0, 0, "subject", "action", "detail" * 20)] * number}


def kept(
    path: Path, query: str = "SELECT name, CAST(content AS INTEGER) FROM state ORDER BY name"
) -> list[tuple[object, ...]]:
    with reading(path) as connection:
        return connection.execute(query).fetchall()


def test_changes_are_on_disk_when_committed_is_called(writer: Writer, path: Path) -> None:
    on_disk: list[list[tuple[object, ...]]] = []
    done = threading.Event()
    writer.put(count("a", 1), lambda _: on_disk.append(kept(path)))
    writer.put(count("b", 2), set_by(done))
    assert done.wait(HANG_S)
    assert ("a", 1) in on_disk[0]


def test_changes_are_committed_in_order_and_several_at_once(writer: Writer, path: Path) -> None:
    order: list[int] = []
    for number in range(1000):
        writer.put(count("last", number), lambda _, number=number: order.append(number))
    writer.close()
    assert order == list(range(1000))
    assert kept(path) == [("last", 999)]
    assert writer.commits < 1000


def test_closing_commits_what_is_queued(path: Path) -> None:
    writer = Writer(path)
    for number in range(100):
        writer.put(count(f"{number:03}", number), ignore)
    writer.close()
    assert len(kept(path)) == 100


def test_old_events_are_deleted(writer: Writer, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.KEPT_ROWS, "events", 10)
    monkeypatch.setattr(module, "PRUNE_EVERY", 1)
    writer.put(events(50), ignore)
    writer.close()
    assert kept(path, "SELECT min(id), count(*) FROM events") == [(41, 10)]


def test_a_full_disk_is_waited_for_and_nothing_is_lost(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    writer = Writer(path)
    writer.put(events(1000), ignore)
    wait_until(lambda: writer.commits == 1)
    late = threading.Event()
    with LimitedDirectory(path.parent).full(os.getpid(), "."):
        writer.put(events(1000) | count("late", 1), set_by(late))
        trouble = wait_until(lambda: writer.trouble.text)
        assert trouble.startswith(f"the ledger {path} cannot be written (")
        assert trouble.endswith("free space on its disk; nothing is lost")
        assert not late.is_set()
        assert kept(path) == []
    assert late.wait(HANG_S)
    assert writer.trouble.text is None
    writer.close()
    assert kept(path) == [("late", 1)]
    assert kept(path, "SELECT count(*) FROM events") == [(2000,)]


def test_a_writer_that_cannot_commit_can_be_closed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    writer = Writer(path)
    writer.put(events(1000), ignore)
    wait_until(lambda: writer.commits == 1)
    late = threading.Event()
    with LimitedDirectory(path.parent).full(os.getpid(), "."):
        writer.put(events(1000) | count("late", 1), set_by(late))
        wait_until(lambda: writer.trouble.text)
        writer.close(timeout_s=0.1)
    assert not late.is_set(), "`committed` is called only for changes on disk"
    assert kept(path) == []


def test_a_locked_ledger_is_waited_for(writer: Writer, path: Path) -> None:
    done = threading.Event()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    writer.put(count("a", 1), set_by(done))
    assert not done.wait(0.05)
    other.execute("ROLLBACK")
    other.close()
    assert done.wait(HANG_S)


def test_an_error_that_no_retry_repairs_reaches_every_later_caller(writer: Writer) -> None:
    errors: list[Exception | None] = []
    done = threading.Event()
    writer.put({"state": [("counts", "a", 0, object())]}, errors.append)  # type: ignore[list-item]
    writer.put({"no such table": [()]}, errors.append)
    writer.put(count("b", 1), lambda error: (errors.append(error), done.set()))
    assert done.wait(HANG_S)
    assert len(errors) == 3
    assert None not in errors

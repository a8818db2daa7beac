"""The table of sessions, in this process: requests of one session that meet."""

import asyncio
import json
import threading
from pathlib import Path

import pytest
from support.conversations import talk
from support.stores import directory_store
from support.waiting import HANG_S

from headpond.config import RunConfig
from headpond.errors import NotFound
from headpond.servers.sessions import session_table
from headpond.servers.sessions.requests import NewSession, SealRequest
from headpond.servers.sessions.session_directory import SessionDirectory
from headpond.servers.sessions.session_table import SessionTable, opened
from headpond.turn import SaidVersion


async def no_version(engine: str, version: int, at: float) -> SaidVersion | None:
    return None


def test_a_score_that_was_accepted_is_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the session is sealed while the score is being written."""
    directory = SessionDirectory(directory_store(tmp_path), "test")
    saving, may_save, save = threading.Event(), threading.Event(), directory.save_score

    def save_slowly(session: str, score: bytes) -> None:
        saving.set()
        assert may_save.wait(HANG_S)
        save(session, score)

    monkeypatch.setattr(directory, "save_score", save_slowly)

    async def main() -> None:
        directory.lock()
        table = SessionTable(directory, RunConfig(store=f"file://{tmp_path}"), [])
        entry, _, _ = await table.create(NewSession())
        await talk(opened(entry), ["hello"])
        posting = asyncio.create_task(table.post_score(entry, b'{"reward": 0.5}'))
        await asyncio.to_thread(saving.wait, HANG_S)
        sealing = asyncio.create_task(table.seal(entry, SealRequest(), version_after=no_version))
        for _ in range(3):  # it has begun
            await asyncio.sleep(0)
        may_save.set()
        await posting
        assert json.loads(await sealing)["score"] == {"reward": 0.5}
        with pytest.raises(NotFound):
            await table.post_score(entry, b'{"reward": 1.0}')
        await table.finish()

    asyncio.run(main())


def test_files_that_are_forgotten_while_they_are_removed_again_end_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that removes nothing."""
    directory, tries = SessionDirectory(directory_store(tmp_path), "test"), list[str]()
    trying, may_fail = threading.Event(), threading.Event()

    def discard(session: str) -> None:
        tries.append(session)
        if tries.count(session) > 1:  # again
            trying.set()
            assert may_fail.wait(HANG_S)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(directory, "discard", discard)
    monkeypatch.setattr(session_table, "MAX_UNDELETED", 1)
    monkeypatch.setattr(session_table, "CHECK_S", 0.01)

    async def main() -> None:
        directory.lock()
        table = SessionTable(directory, RunConfig(store=f"file://{tmp_path}"), [])
        first, second = [(await table.create(NewSession()))[0] for _ in range(2)]
        await table.delete(first)
        watching = asyncio.create_task(table.watch())
        await asyncio.to_thread(trying.wait, HANG_S)
        await table.delete(second)
        may_fail.set()
        while tries.count(second.id) < 2:
            assert not watching.done(), watching.exception()
            await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(main())

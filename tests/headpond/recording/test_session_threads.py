"""Files of sessions are written in a few threads, never on the loop."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from support.conversations import started, talk
from support.engine_clients import run
from support.stores import directory_store

from headpond.recording import session, spool

WRITERS = ("frame", "entry_frame", "columns_of", "write_columns", "seal_experts", "routed_valid_of")


def test_turns_and_blobs_are_written_off_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, set[str]] = {}

    def watched(module: Any, name: str) -> Any:
        really = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name.rpartition("_")[0])
            return really(*args, **kwargs)

        return call

    for name in WRITERS:
        monkeypatch.setattr(spool, name, watched(spool, name))
    monkeypatch.setattr(session, "sample_tree", watched(session, "sample_tree"))

    async def main() -> None:
        recorded = await started(directory_store(tmp_path))
        await talk(recorded, ["hello", "and", "bye"])
        sealed = await recorded.seal()
        assert sealed.experts is not None

    run(main)
    assert threads == {name: {"headpond-files"} for name in (*WRITERS, "sample_tree")}


def test_two_hundred_sessions_share_at_most_eight_file_threads(tmp_path: Path) -> None:
    async def main() -> None:
        store = directory_store(tmp_path)
        sessions = await asyncio.gather(*(started(store, key=f"rollouts/{number}") for number in range(200)))
        await asyncio.gather(*(talk(session, ["hello"]) for session in sessions))
        await asyncio.gather(*(session.seal() for session in sessions))
        writing = [thread for thread in threading.enumerate() if thread.name.startswith("headpond-files")]
        others = [thread for thread in threading.enumerate() if thread.name.startswith("headpond-io")]
        assert 1 <= len(writing) <= 8
        assert others == []

    run(main, concurrency=1000)

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from msgspec import structs
from support.conversations import assistant, chat, conversation_of, prompt_ids, started, talk, turn_for, user
from support.stores import directory_store
from support.waiting import wait_until

from headpond.errors import BadRequest, BlobCorrupt, BlobMissing
from headpond.fields import FieldValues, TrainerField
from headpond.recording import Mode, Session, unsealed
from headpond.recording.turn_log import ALIGNMENT, PREAMBLE
from headpond.store import open_store
from headpond.store.columns import read_columns
from headpond.store.files import FileStore

T = TypeVar("T")

TESTS = Path(__file__).parents[2]
KEY = "rollouts/r1/1.aa"
TEXTS = [f"number {number}" for number in range(6)]


def run(main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(main)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return directory_store(tmp_path / "store")


@pytest.fixture
def undisturbed(tmp_path: Path) -> Any:
    """The sealed rollout of a process that is not killed."""

    async def main() -> Any:
        session = await started(directory_store(tmp_path / "undisturbed"), mode=Mode.LINEAR)
        await talk(session, TEXTS)
        return await session.seal()

    return run(main())


def log_of(store: FileStore) -> Path:
    return store.root / KEY / ".columns.safetensors.log"


def rows_of_session(store: FileStore) -> Path:
    return store.root / KEY / ".experts.safetensors.rows"


async def recorded(store: FileStore, turns: int) -> Session:
    session = await started(store, mode=Mode.LINEAR)
    await talk(session, TEXTS[:turns])
    return session


RECORDER = """
import asyncio, sys
from pathlib import Path
from support.conversations import assistant, chat, started, user
from support.stores import directory_store
from headpond.recording import Mode

async def main():
    session = await started(directory_store(Path(sys.argv[1])), mode=Mode.LINEAR)
    messages = []
    for text in sys.argv[2:]:
        messages.append(user(text))
        messages.append(assistant(await chat(session, messages)))
        print(session.turns, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("killed_after", [0, 1, 3, 6])
def test_all_turns_of_a_killed_process_are_recovered(store: FileStore, undisturbed: Any, killed_after: int) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    command = [sys.executable, "-c", RECORDER, str(store.root), *TEXTS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as recorder:
        assert recorder.stdout
        for line in recorder.stdout if killed_after else []:
            if int(line) >= killed_after:
                break
        if not killed_after:
            wait_until(lambda: log_of(store).exists() and log_of(store).stat().st_size)
        os.kill(recorder.pid, signal.SIGKILL)

    async def main() -> None:
        session = await Session.recover(store, KEY)
        assert killed_after <= session.turns <= len(TEXTS)
        messages = conversation_of(TEXTS[: session.turns])
        assert session.token_ids().tolist() == (prompt_ids(messages)[:-1] if messages else [])
        await talk(session, TEXTS[session.turns :], after=messages)
        assert await session.seal() == undisturbed

    run(main())


def test_a_session_in_a_store_without_local_files_is_recovered_on_its_host(
    tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    memory = open_store(f"memory://{tmp_path}")
    memory.keep_spool("server")

    async def main() -> None:
        await talk(await started(memory, mode=Mode.LINEAR), TEXTS[:3])
        assert unsealed(memory, "rollouts") == [KEY]
        assert list(memory.keys("rollouts")) == []
        session = await Session.recover(memory, KEY)
        await talk(session, TEXTS[3:], after=conversation_of(TEXTS[:3]))
        sealed = await session.seal()
        assert sealed == undisturbed
        assert sorted(memory.keys("rollouts")) == sorted(ref.key for ref in (sealed.columns, sealed.experts) if ref)
        assert unsealed(memory, "rollouts") == []

    run(main())


def test_fields_that_turns_carry_are_recovered(store: FileStore) -> None:
    async def main() -> None:
        session = await started(store, KEY)
        with session.claim() as claim:
            prepared = session.prepare(claim, [user("hi")])
            turn = turn_for(prepared, [user("hi")])
            fields = {"step": np.arange(len(turn.completion_ids)), "role": np.array(3)}
            assert await session.commit(claim, prepared, structs.replace(turn, fields=fields))
        recovered = await Session.recover(store, KEY)
        declared = (
            TrainerField(name="step", source="turn", dtype="i32"),
            TrainerField(name="role", source="turn", per="sample", dtype="u8"),
        )
        columns = read_columns(store, (await recovered.seal(fields=FieldValues(declared=declared))).columns)
        start = int(columns.turns.start[0])
        assert columns.token_fields["step"][start:].tolist() == fields["step"].tolist()
        assert columns.sample_fields["role"].tolist() == [3]

    run(main())


def test_a_cut_off_frame_is_discarded(store: FileStore, undisturbed: Any) -> None:
    async def two_turns() -> int:
        session = await recorded(store, 1)
        whole = log_of(store).stat().st_size
        await talk(session, TEXTS[1:2], after=conversation_of(TEXTS[:1]))
        return whole

    first = run(two_turns())
    log, rows = log_of(store).read_bytes(), rows_of_session(store).read_bytes()

    async def recover(cut: int) -> None:
        log_of(store).write_bytes(log[:cut])
        rows_of_session(store).write_bytes(rows)
        session = await Session.recover(store, KEY)
        assert session.turns == (2 if cut == len(log) else 1)
        assert log_of(store).stat().st_size == (first if cut < len(log) else len(log))

    for cut in [*range(first, len(log), 37), len(log) - 1, len(log)]:
        run(recover(cut))

    async def damaged_and_continued() -> None:
        (length, _), padded = PREAMBLE.unpack_from(log, first), len(log)
        assert padded - ALIGNMENT < first + PREAMBLE.size + length <= padded
        for flipped in range(first, first + PREAMBLE.size + length, 41):  # nothing reads what pads the frame
            torn = bytearray(log)
            torn[flipped] ^= 1
            log_of(store).write_bytes(torn)
            assert (await Session.recover(store, KEY)).turns == 1
        session = await Session.recover(store, KEY)
        await talk(session, TEXTS[1:], after=conversation_of(TEXTS[:1]))
        assert await session.seal() == undisturbed

    run(damaged_and_continued())


def test_a_log_without_a_complete_frame_cannot_be_recovered(store: FileStore) -> None:
    with pytest.raises(BlobMissing, match=KEY):
        run(Session.recover(store, KEY))
    assert unsealed(store, "rollouts") == []
    run(recorded(store, 0))
    assert unsealed(store, "rollouts") == [KEY]
    assert run(Session.recover(store, KEY)).turns == 0
    log_of(store).write_bytes(log_of(store).read_bytes()[:-1])
    with pytest.raises(BlobCorrupt, match=f"{KEY} has no complete frame"):
        run(Session.recover(store, KEY))


def test_damaged_rows_are_refused(store: FileStore) -> None:
    run(recorded(store, 2))
    rows = rows_of_session(store).read_bytes()
    rows_of_session(store).write_bytes(rows[:-1] + bytes([rows[-1] ^ 1]))
    with pytest.raises(BlobCorrupt, match="do not match their recorded checksum"):
        run(Session.recover(store, KEY))
    rows_of_session(store).write_bytes(rows[:-1])
    with pytest.raises(BlobCorrupt, match="has only"):
        run(Session.recover(store, KEY))
    rows_of_session(store).unlink()
    with pytest.raises(BlobMissing, match="is missing"):
        run(Session.recover(store, KEY))


def test_rows_of_an_uncommitted_turn_are_discarded(store: FileStore) -> None:
    run(recorded(store, 0))
    rows_of_session(store).write_bytes(bytes(5000))

    async def main() -> None:
        session = await Session.recover(store, KEY)
        await chat(session, [user("hello")])
        sealed = await session.seal()
        assert sealed.experts
        assert sealed.experts.size < 4096 + 1000

    run(main())


def test_a_session_killed_while_sealing_can_be_sealed_again(store: FileStore, undisturbed: Any, tmp_path: Path) -> None:
    """The last two steps of sealing: the experts file is renamed, the log is removed."""

    async def sealed_except_for_the_last_step() -> None:
        session = await recorded(store, len(TEXTS))
        shutil.copy(log_of(store), tmp_path / "log")
        await session.seal()
        shutil.copy(tmp_path / "log", log_of(store))

    run(sealed_except_for_the_last_step())

    async def main() -> None:
        session = await Session.recover(store, KEY)
        assert session.turns == len(TEXTS)
        assert await session.seal() == undisturbed
        assert unsealed(store, "rollouts") == []
        with pytest.raises(BlobMissing, match="sealed or closed"):
            await Session.recover(store, KEY)

    run(main())


def test_a_recovered_conversation_can_be_continued_and_reverted(store: FileStore) -> None:
    run(recorded(store, 3))
    messages = conversation_of(TEXTS[:3])

    async def main() -> None:
        session = await Session.recover(store, KEY)
        other = [*messages[:4], user("another way")]
        with session.claim() as claim:
            assert session.prepare(claim, other).request.parent.turn == 1
            with pytest.raises(BadRequest, match="at most one"):
                session.prepare(claim, [*messages[:2], user("too far back")])
            with pytest.raises(BadRequest, match="diverge"):
                session.prepare(claim, [user("number 0"), assistant("no"), user("1")])
        assert len(await session.records()) == 3

    run(main())

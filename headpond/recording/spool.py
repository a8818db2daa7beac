"""The files of a session while it is recorded: the log of its turns, and the part with the routed
rows.

The columns blob is written from memory (`Samples`). The log holds the messages, and everything to
recover a session. All methods block: call them in a thread, one at a time. A turn is written
completely or not at all. Its rows come first, so that the log never refers to missing rows.
"""

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import orjson

from headpond.errors import BlobCorrupt, BlobMissing, Upstream
from headpond.fields import FieldValues
from headpond.ids import COLUMNS_FILE, EXPERTS_FILE
from headpond.recording.conversation import Mode
from headpond.recording.echoes import Echo
from headpond.recording.sample_columns import columns_of, routed_valid_of
from headpond.recording.sample_tree import SampleTree
from headpond.recording.turn_log import (
    LEFT_OUT_KEY,
    SEEN_KEY,
    Bytes,
    LogEntry,
    RowsState,
    TurnLog,
    entry_frame,
    frame,
    frames,
    read_log,
)
from headpond.spans import TimedSpan
from headpond.store import BlobRef, Store
from headpond.store.atomic import temporary_path, writing
from headpond.store.columns import write_columns
from headpond.store.experts import seal_experts
from headpond.store.parts import GrowingFile, Part, mapped
from headpond.store.tensors import Tensors
from headpond.turn import Message, Rows

LOG, ROWS = "log", "rows"  # suffixes of the temporary names; a later process finds the files by them


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    session: str
    # Directory of the session's files in the store. It names an execution, so that no two
    # write the same files.
    key: str
    sealed_key: str | None = None  # Directory of the sealed blobs. Default: `key`.
    rollout: str
    attempt: int
    mode: Mode = Mode.OPEN
    echo: Echo = Echo.RECOGNISED  # The rule that makes an assistant message a recorded answer.
    concurrency: int = 1  # Maximum number of chats in flight.
    queue: bool = False  # Whether further chats wait; otherwise they are refused.
    # Roles of the messages that may be appended to a linear conversation.
    append_roles: tuple[str, ...] = ("tool", "user")
    max_seq_len: int | None = None
    max_samples: int | None = None
    logprobs_mode: str = "processed"
    notes: str = ""  # Returned when the session is recovered. Opaque here.

    def blob(self, name: str) -> str:
        return f"{self.sealed_key or self.key}/{name}"


def unsealed(store: Store, under: str) -> list[str]:
    """Keys of the unsealed sessions below a directory, which a new process may recover."""
    logs = store.local_path(under).rglob(f".{COLUMNS_FILE}.{LOG}")
    return sorted(log.parent.relative_to(store.spool_dir).as_posix() for log in logs)


class Spool:
    def __init__(
        self,
        store: Store,
        settings: SessionSettings,
        *,
        log: GrowingFile,
        rows: Part | None = None,
        rows_state: RowsState | None = None,
        frames: "array[int] | None" = None,
        left_out: "array[int] | None" = None,
    ) -> None:
        self._store = store
        self.settings = settings
        self._log = log
        # Offset of each turn's frame in the log.
        self._frames = array("q") if frames is None else frames
        # Offset of the frame of each chat outside the recording.
        self._left_out = array("q") if left_out is None else left_out
        self._rows = rows
        self._rows_state = rows_state
        # the sealed experts; sealing may have failed afterwards
        self._experts: BlobRef | None = None

    @classmethod
    def create(cls, store: Store, settings: SessionSettings) -> "Spool":
        log = GrowingFile(store.part_path(f"{settings.key}/{COLUMNS_FILE}", LOG))
        log.create()
        log.append(*frame({"settings": settings}, {}))
        return cls(store, settings, log=log)

    @classmethod
    def recover(cls, store: Store, key: str) -> tuple["Spool", TurnLog]:
        """The session at `key` as a killed process left it, up to the last complete turn."""
        path = store.part_path(f"{key}/{COLUMNS_FILE}", LOG)
        complete = list(frames(_mapped(path)))
        if not complete:
            raise BlobCorrupt(f"the log of the session at {key} has no complete frame: it cannot be recovered")
        turns, end = read_log(complete[1:], begin=complete[0][1]), complete[-1][1]
        os.truncate(path, end)
        settings = msgspec.json.decode(complete[0][0].metadata["settings"], type=SessionSettings)
        spool = cls(
            store,
            settings,
            log=GrowingFile(path, length=end),
            rows=_recover_rows(store, settings, turns.rows),
            rows_state=turns.rows,
            frames=array("q", turns.frames),
            left_out=array("q", turns.left_out),
        )
        return spool, turns

    def write(self, entry: LogEntry, rows: Sequence[Rows]) -> None:
        """Write a committed turn. `rows` are those of its chunks."""
        state, part = self._rows_state, self._rows_part() if rows else None
        mark = part and part.mark()
        try:
            if part:
                state = self._append_rows(part, rows)
            begin = self._log.length
            self._log.append(*entry_frame(entry, state))
        except BaseException:
            if part and mark:
                part.reset(mark)
            raise
        self._frames.append(begin)
        self._rows_state = state

    def write_left_out(self, record: bytes) -> None:
        """Write the record of a chat outside the recording."""
        begin = self._log.length
        self._log.append(*frame({LEFT_OUT_KEY: True}, {"record": np.frombuffer(record, np.uint8)}))
        self._left_out.append(begin)

    def write_seen(self, turns: Sequence[int]) -> None:
        """Note that the answers of these turns were seen."""
        self._log.append(*frame({SEEN_KEY: turns}, {}))

    def seal(
        self,
        samples: SampleTree,
        paths: Sequence[Sequence[int]],
        *,
        error: str,
        fields: FieldValues,
        spans: Sequence[TimedSpan] = (),
    ) -> tuple[BlobRef, BlobRef | None]:
        """Write the columns and, if rows were recorded, the experts. `paths` has each sample's turns. Can be repeated
        after an error. The log stays until `finish`."""
        settings, state = self.settings, self._rows_state
        columns = columns_of(
            samples,
            rollout=settings.rollout,
            attempt=settings.attempt,
            logprobs_mode=settings.logprobs_mode,
            error=error,
            fields=fields,
            conversation=self._conversation(paths),
            spans=spans,
        )
        ref = write_columns(self._store, settings.blob(COLUMNS_FILE), columns)
        if self._rows and state:
            self._experts = seal_experts(
                self._store,
                settings.blob(EXPERTS_FILE),
                self._rows,
                chunks=samples.chunks(),
                routed_valid=routed_valid_of(samples),
                row=(state.layers, state.topk),
                dtype=np.dtype(state.dtype),
                rollout=settings.rollout,
                attempt=settings.attempt,
            )
            self._rows = None
        return ref, self._experts

    def finish(self) -> None:
        """Remove the log of a sealed session."""
        with writing(self._log.path):
            self.discard()

    @property
    def chats_left_out(self) -> int:
        return len(self._left_out)

    @property
    def nbytes(self) -> int:
        return self._log.length + (self._rows.length if self._rows else 0)

    def records(self, turns: Sequence[int]) -> list[bytes]:
        return [body.arrays["record"].tobytes() for body in self._bodies(turns)]

    def answers(self, turns: Sequence[int]) -> list[Message]:
        return [orjson.loads(body.arrays["answer"].tobytes()) for body in self._bodies(turns)]

    def messages(self, turns: Sequence[int]) -> list[Message]:
        """The conversation of a path: the messages that each turn's request appended, and its
        answer."""
        parts = ((body.arrays["appended"].tobytes(), body.arrays["answer"].tobytes()) for body in self._bodies(turns))
        return [message for appended, answer in parts for message in (*orjson.loads(appended), orjson.loads(answer))]

    def left_out(self) -> list[bytes]:
        """The records of chats outside the recording."""
        return [body.arrays["record"].tobytes() for body in self._frames_at(self._left_out)]

    def discard(self) -> None:
        """Remove the files that are not sealed."""
        self._log.discard()
        if self._rows:
            self._rows.discard()

    def _bodies(self, turns: Iterable[int]) -> Iterator[Tensors]:
        return self._frames_at(self._frames[turn] for turn in turns)

    def _frames_at(self, places: Iterable[int]) -> Iterator[Tensors]:
        content = _mapped(self._log.path)
        for place in places:
            frame_at = next(frames(content, place), None)
            if frame_at is None:
                raise BlobCorrupt(f"the log of the session at {self.settings.key} is damaged at byte {place}")
            yield frame_at[0]

    def _rows_part(self) -> Part:
        if self._rows is None:
            self._rows = Part(temporary_path(self._log.path.with_name(EXPERTS_FILE), ROWS), reserve_head=True)
            self._rows.create()
        return self._rows

    def _append_rows(self, part: Part, rows: Sequence[Rows]) -> RowsState:
        shape, dtype, previous = rows[0].shape[1:], rows[0].dtype.name, self._rows_state
        if previous and (previous.layers, previous.topk, previous.dtype) != (*shape, dtype):
            raise Upstream(f"routed experts changed within a session: now {shape} {dtype}, before {previous}")
        part.append(*rows)
        return RowsState(layers=shape[0], topk=shape[1], dtype=dtype, length=part.length, checksum=part.tail_checksum())

    def _conversation(self, paths: Sequence[Sequence[int]]) -> bytes:
        """The messages of each path as JSON, joined from the messages of its turns."""
        by_turn: list[bytes] = []
        for body in self._bodies(range(len(self._frames))):
            appended, answer = (body.arrays[name].tobytes() for name in ("appended", "answer"))
            by_turn.append(b",".join(text for text in (appended[1:-1], answer) if text not in (b"", b"{}")))
        messages = (b",".join(by_turn[turn] for turn in path if by_turn[turn]) for path in paths)
        return b"[" + b",".join(b"[" + texts + b"]" for texts in messages) + b"]"


def _recover_rows(store: Store, settings: SessionSettings, state: RowsState | None) -> Part | None:
    path = store.part_path(f"{settings.key}/{EXPERTS_FILE}", ROWS)
    if state is None:
        path.unlink(missing_ok=True)  # created for a turn that was never committed
        return None
    if not path.exists():
        store.take_back(settings.blob(EXPERTS_FILE), path)  # killed while sealing, before the caller had the blob
    part = Part.recover(path, state.length)
    if part.tail_checksum() != state.checksum:
        raise BlobCorrupt(f"the routed rows of the session at {settings.key} do not match their recorded checksum")
    return part


def _mapped(path: Path) -> Bytes:
    try:
        with path.open("rb") as file:
            return mapped(file.fileno())
    except FileNotFoundError:
        raise BlobMissing(f"{path} does not exist: nothing was recorded, or the session was sealed or closed") from None

"""Answers that are being written to clients, noted in a mapped file so that a kill loses no note.

A note costs no system call, and the kernel keeps what a killed process wrote. The turn log has the note soon after; its
slot is then free.
"""

import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

SLOT = struct.Struct("<16sIB3x")  # session, turn, state
STATE_AT = 20
SLOTS = 1 << 16
"""Notes at a time: the answers of 20 ms, and those that a kill interrupted, one for each chat in flight. 1.5 MB."""
FREE, WRITING, WRITTEN = 0, 1, 2


class HandedAnswers:
    """Not for threads. Without a free slot nothing is noted: a kill then leaves the turn unseen."""

    def __init__(self, path: Path) -> None:
        """Blocks. OSError if there is no room for the file."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.posix_fallocate(descriptor, 0, SLOT.size * SLOTS)  # a write to a page without room would end the process
            self._map = mmap.mmap(descriptor, SLOT.size * SLOTS)
        finally:
            os.close(descriptor)
        self._slots: dict[str, dict[int, int]] = {}
        for at, session, turn in _taken(self._map[:]):
            self._slots.setdefault(session, {})[turn] = at
        taken = {at for slots in self._slots.values() for at in slots.values()}
        self._free = [at for at in reversed(range(SLOTS)) if at not in taken]

    @property
    def sessions(self) -> list[str]:
        return list(self._slots)

    def of(self, session: str) -> Mapping[int, int]:
        """The states of the session's turns."""
        return {turn: self._map[at * SLOT.size + STATE_AT] for turn, at in self._slots.get(session, {}).items()}

    def begin(self, session: str, turn: int) -> None:
        """The answer is about to be written."""
        slots = self._slots.setdefault(session, {})
        if turn not in slots and self._free:
            slots[turn] = self._free.pop()
            SLOT.pack_into(self._map, slots[turn] * SLOT.size, bytes.fromhex(session), turn, FREE)
        self._set(session, turn, WRITING)

    def written(self, session: str, turn: int) -> None:
        """Wholly, to an open connection."""
        self._set(session, turn, WRITTEN)

    def forget(self, session: str, turn: int) -> None:
        """The client has gone, or the turn log has the note."""
        self._set(session, turn, FREE)
        slots = self._slots.get(session, {})
        if (at := slots.pop(turn, None)) is not None:
            self._free.append(at)
        if not slots:
            self._slots.pop(session, None)

    def forget_written(self, session: str) -> None:
        """The turn log has the notes of all answers that were written."""
        for turn, state in self.of(session).items():
            if state == WRITTEN:
                self.forget(session, turn)

    def forget_session(self, session: str) -> None:
        for turn in list(self._slots.get(session, ())):
            self.forget(session, turn)

    def _set(self, session: str, turn: int, state: int) -> None:
        """One byte, written last: a kill leaves no half of a note."""
        if (at := self._slots.get(session, {}).get(turn)) is not None:
            self._map[at * SLOT.size + STATE_AT] = state


def _taken(content: bytes) -> Iterator[tuple[int, str, int]]:
    states = np.frombuffer(content, np.uint8)[STATE_AT :: SLOT.size]
    for at in np.flatnonzero(states).tolist():
        session, turn, _ = SLOT.unpack_from(content, at * SLOT.size)
        yield at, session.hex(), turn

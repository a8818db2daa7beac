"""Notes of answers that are being written, across the processes of a server."""

from pathlib import Path

from headpond.servers.sessions import handed_answers
from headpond.servers.sessions.handed_answers import SLOTS, WRITING, WRITTEN, HandedAnswers

ONE, OTHER = "1" * 32, "f" * 32


def test_notes_outlive_their_process_until_they_are_forgotten(tmp_path: Path) -> None:
    handed = HandedAnswers(tmp_path / "notes")
    for turn in range(4):
        handed.begin(ONE, turn)
    handed.begin(OTHER, 7)
    handed.written(ONE, 1)
    handed.forget(ONE, 2)
    handed.written(ONE, 3)
    again = HandedAnswers(tmp_path / "notes")
    assert (again.of(ONE), again.of(OTHER)) == ({0: WRITING, 1: WRITTEN, 3: WRITTEN}, {7: WRITING})
    again.forget_written(ONE)
    again.forget_session(OTHER)
    last = HandedAnswers(tmp_path / "notes")
    assert (last.of(ONE), last.sessions) == ({0: WRITING}, [ONE])


def test_without_a_free_slot_nothing_is_noted(tmp_path: Path) -> None:
    handed = HandedAnswers(tmp_path / "notes")
    for turn in range(SLOTS + 1):
        handed.begin(ONE, turn)
    handed.written(ONE, SLOTS)
    assert len(handed.of(ONE)) == SLOTS
    assert handed.of(ONE).keys() == set(range(SLOTS))
    handed.forget(ONE, 5)
    handed.begin(OTHER, 0)
    assert HandedAnswers(tmp_path / "notes").of(OTHER) == {0: WRITING}
    assert (tmp_path / "notes").stat().st_size == SLOTS * handed_answers.SLOT.size

"""Which turns of a session have an answer that no client has seen, and what of that the log does not have yet."""

from collections.abc import Iterable


class UnseenTurns:
    """Turns whose answers no client has received as far as is known."""

    def __init__(self) -> None:
        self.turns: set[int] = set()
        self.assumed: set[int] = set()
        """Those of them whose answers were being written when their process was killed."""
        self.unsaved: dict[int, None] = {}
        """Turns that were seen since the log was written."""

    def add(self, turn: int, *, seen: bool) -> None:
        if not seen:
            self.turns.add(turn)

    @property
    def masked(self) -> set[int]:
        return self.turns - self.assumed

    def see(self, turn: int) -> None:
        self.assumed.discard(turn)
        if turn in self.turns:
            self.turns.discard(turn)
            self.unsaved[turn] = None

    def saved(self, turns: Iterable[int]) -> None:
        for turn in turns:
            self.unsaved.pop(turn, None)

"""What is known of a session's turns besides their contents: whether a client saw the answer, and the request."""

from collections.abc import Iterable, Set

DIGEST_BYTES = 16


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


class RecordedRequests:
    """The requests of a session's turns, by their digests and idempotency keys."""

    def __init__(self) -> None:
        self._digests = bytearray()  # 16 bytes a turn: they are searched only for a request that may be a retry
        self._keys: dict[str, int] = {}

    def add(self, turn: int, request: bytes, key: str) -> None:
        if request:
            self._digests.extend(bytes(turn * DIGEST_BYTES - len(self._digests)) + request)
        if key:
            self._keys[key] = turn

    def find(self, request: bytes, key: str, *, prefer: Set[int]) -> int | None:
        """The newest turn of this request with this key. Without a key, the newest one of `prefer` if there is any."""
        found = list(self._turns(request))
        if key:
            return self._keys[key] if self._keys.get(key) in found else None
        return max(prefer & set(found) or found, default=None)

    def _turns(self, request: bytes) -> Iterable[int]:
        at = self._digests.find(request)
        while at >= 0:
            if at % DIGEST_BYTES == 0:
                yield at // DIGEST_BYTES
            at = self._digests.find(request, at + 1)

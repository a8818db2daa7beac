"""The requests of a session. It counts chats in flight, numbers requests by arrival, and marks
unseen answers.

A request's number decides its seed, and later its place among the samples. A request that is sent
again, after a failed chat or a killed process, keeps its number.
"""

import asyncio
import contextlib
from collections.abc import Generator, Iterable, Set
from dataclasses import dataclass

from headpond.errors import Busy

BUSY = "session already has an in-flight chat completion"
# Chats that may wait for a free place. An agent that starts more at once is refused.
MAX_QUEUED = 256
# Numbers of failed requests that are kept for their retries: more than chats in flight at one
# time.
MAX_LOST = 64
DIGEST_BYTES = 16


@dataclass(eq=False, kw_only=True)
class Claim:
    """A place for one chat."""

    arrival: int | None = None  # Number of its request, once it has arrived.
    request: bytes = b""  # Digest of the request.
    turn: int | None = None  # The turn that was recorded.


class Arrivals:
    def __init__(self, *, concurrency: int, queue: bool) -> None:
        self._concurrency = concurrency
        self._queue = queue
        self._claims: list[Claim] = []
        self._waiting: list[asyncio.Future[None]] = []  # at most 256; an empty deque takes 760 bytes
        # Number of a request that was not recorded -> its digest.
        self._lost: dict[int, bytes] = {}
        self._last_recorded = -1

    @property
    def in_flight(self) -> int:
        return len(self._claims)

    @property
    def full(self) -> bool:
        return len(self._claims) >= self._concurrency

    def holds(self, claim: Claim) -> bool:
        return claim in self._claims

    async def wait(self) -> None:
        """Wait for a free place, in the order of the calls, if chats may wait."""
        woken = False
        while self._queue and (self.full or (self._waiting and not woken)):
            if len(self._waiting) >= MAX_QUEUED:
                raise Busy(f"{BUSY}, and {MAX_QUEUED} chats wait")
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.insert(0 if woken else len(self._waiting), place)
            try:
                await place
            except asyncio.CancelledError:
                if place.done() and not place.cancelled():
                    self._wake()
                raise
            finally:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(place)
            woken = True

    @contextlib.contextmanager
    def claim(self) -> Generator[Claim]:
        """Claim a place for one chat. Busy if there is none."""
        if self.full:
            raise Busy(BUSY)
        claim = Claim()
        self._claims.append(claim)
        try:
            yield claim
        finally:
            self._claims.remove(claim)
            if claim.arrival is not None and claim.turn is None and claim.request:
                self._note_lost(claim.arrival, claim.request)
            self._wake()

    def arrive(self, claim: Claim, request: bytes) -> int:
        """Number the claim's request. A request that is sent again gets its lost number."""
        if claim.arrival is None:
            claim.request = request
            sent_again = [number for number, lost in self._lost.items() if request and lost == request]
            claim.arrival = min(sent_again, default=self._next())
            self._lost.pop(claim.arrival, None)
        return claim.arrival

    def has_lost(self, request: bytes) -> bool:
        return request in self._lost.values()

    def record(self, arrival: int) -> None:
        """Note that a turn with this number is recorded."""
        self._last_recorded = max(self._last_recorded, arrival)
        self._lost.pop(arrival, None)

    def earlier(self, arrival: int) -> tuple[tuple[int, str], ...]:
        """Requests with smaller numbers that are not recorded. The log keeps them."""
        claimed = [(claim.arrival, claim.request) for claim in self._claims if claim.arrival is not None]
        unrecorded = [(number, request.hex()) for number, request in (*claimed, *self._lost.items()) if request]
        return tuple(sorted(entry for entry in unrecorded if entry[0] < arrival))

    def recover(self, unrecorded: Iterable[tuple[int, str]], recorded: Iterable[int]) -> None:
        """Continue from the numbers that the log holds."""
        self._last_recorded = max(recorded, default=-1)
        numbers = set(recorded)
        for number, request in unrecorded:
            if number not in numbers:
                self._note_lost(number, bytes.fromhex(request))

    def end(self) -> None:
        """Wake the waiting chats when the session has ended: no place becomes free for them."""
        self._queue = False
        while self._waiting:
            self._wake()

    def _next(self) -> int:
        claimed = [claim.arrival for claim in self._claims if claim.arrival is not None]
        return 1 + max([self._last_recorded, *claimed])

    def _note_lost(self, arrival: int, request: bytes) -> None:
        self._lost[arrival] = request
        while len(self._lost) > MAX_LOST:
            del self._lost[next(iter(self._lost))]

    def _wake(self) -> None:
        while self._waiting:
            place = self._waiting.pop(0)
            if not place.done():
                place.set_result(None)
                return


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
        turns = list(self._turns(request))
        if key:
            return self._keys[key] if self._keys.get(key) in turns else None
        return max(prefer & set(turns) or turns, default=None)

    def _turns(self, request: bytes) -> Iterable[int]:
        at = self._digests.find(request)
        while at >= 0:
            if at % DIGEST_BYTES == 0:
                yield at // DIGEST_BYTES
            at = self._digests.find(request, at + 1)


class UnseenTurns:
    """Turns whose answers no client is known to have received, and changes that the log lacks yet."""

    def __init__(self) -> None:
        self.turns: set[int] = set()
        self.unsaved: dict[int, None] = {}  # Turns that were seen since the log was written.

    def add(self, turn: int, *, seen: bool) -> None:
        if not seen:
            self.turns.add(turn)

    def see(self, turn: int) -> None:
        if turn in self.turns:
            self.turns.discard(turn)
            self.unsaved[turn] = None

    def saved(self, turns: Iterable[int]) -> None:
        for turn in turns:
            self.unsaved.pop(turn, None)

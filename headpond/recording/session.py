"""A session: one conversation with the policy, recorded turn by turn. Rollouts and the session
server use it.

State changes only in synchronous functions on the loop's thread. Chats are in flight side by side;
their commits are serial, under a lock that only commits use. Files are written in threads. A turn
is in memory only if it is on disk.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Generator, Sequence
from enum import StrEnum
from functools import partial

import numpy as np
import orjson

from headpond.errors import Busy, ContextFull, Invariant, NotFound, NothingToTrain
from headpond.event_loop.cancellation import run_to_completion
from headpond.event_loop.offload import in_file_thread
from headpond.fields import NO_FIELDS, FieldValues
from headpond.recording.arrivals import BUSY, Arrivals, Claim, RecordedRequests, UnseenTurns
from headpond.recording.conversation import (
    NO_ARRIVAL,
    START,
    Conversation,
    ConversationRequest,
    DigestedMessages,
    Mode,
    Prepared,
)
from headpond.recording.echoes import restored
from headpond.recording.sample_columns import recorded
from headpond.recording.sample_tree import SampleTree, sample_tree
from headpond.recording.samples import Samples
from headpond.recording.spool import SessionSettings, Spool
from headpond.recording.turn_log import LogEntry
from headpond.records.rollout import Recorded
from headpond.spans import TimedSpan
from headpond.store import Store
from headpond.turn import ANY_FORMAT, Ids, Message, RouteFormat, SaidVersion, Turn, TurnMetadata

logger = logging.getLogger(__name__)

NO_METADATA = TurnMetadata()
# (engine, version before the request, time of the response) -> the version after it
# (`Replicas.after`).
VersionAfter = Callable[[str, int, float], Awaitable[SaidVersion | None]]


class State(StrEnum):
    OPEN = "open"
    SEALED = "sealed"  # its blobs are written or being written
    CLOSED = "closed"


class Session:
    def __init__(self, spool: Spool, *, route_format: RouteFormat = ANY_FORMAT) -> None:
        self.settings = spool.settings
        self._spool = spool
        self._samples = Samples(max_samples=self.settings.max_samples)
        roles = frozenset(self.settings.append_roles)
        self._conversation = Conversation(mode=self.settings.mode, append_roles=roles, echo=self.settings.echo)
        self._route_format = route_format
        self._state = State.OPEN
        self._arrivals = Arrivals(concurrency=self.settings.concurrency, queue=self.settings.queue)
        self._unseen = UnseenTurns()
        self._requests = RecordedRequests()
        self._commits = asyncio.Lock()
        self._recordings: set[asyncio.Task[bool]] = set()
        self._sealing: asyncio.Task[Recorded] | None = None

    @classmethod
    async def start(
        cls, store: Store, settings: SessionSettings, *, route_format: RouteFormat = ANY_FORMAT
    ) -> "Session":
        return cls(await in_file_thread(Spool.create, store, settings), route_format=route_format)

    @classmethod
    async def recover(cls, store: Store, key: str, *, route_format: RouteFormat = ANY_FORMAT) -> "Session":
        """The session that another process recorded at `key`, with all its committed turns."""
        return await in_file_thread(cls._recovered, store, key, route_format)

    @classmethod
    def _recovered(cls, store: Store, key: str, route_format: RouteFormat) -> "Session":
        spool, log = Spool.recover(store, key)
        session = cls(spool, route_format=route_format)
        for turn, entry in enumerate(log.entries):
            arrival, conversation = entry.delta.arrival, session._conversation
            session._samples.add(entry.delta)
            request = conversation.request(entry.parent, orjson.loads(entry.appended), echo=entry.echo)
            answer = orjson.loads(entry.answer)
            conversation.commit(
                conversation.checkpoint_after(request, answer, arrival=arrival, agent=entry.delta.agent)
            )
            session._samples.repaired.update(entry.repaired)
            session._unseen.add(turn, seen=entry.seen or turn in log.seen)
            session._requests.add(turn, entry.request, entry.key)
        unrecorded = [number_and_digest for entry in log.entries for number_and_digest in entry.beside]
        session._arrivals.recover(unrecorded, [entry.delta.arrival for entry in log.entries])
        return session

    @property
    def turns(self) -> int:
        return len(self._samples.turns)

    @property
    def busy(self) -> bool:
        """Whether a chat is in flight, or the blobs are being written."""
        return bool(self._arrivals.in_flight) or (self._sealing is not None and not self._sealing.done())

    @property
    def full(self) -> bool:
        """Whether a further chat is refused, or waits."""
        return self._arrivals.full

    @property
    def begun(self) -> int:
        """Turns that are recorded or in flight."""
        return self.turns + self._arrivals.in_flight

    @property
    def sealed(self) -> bool:
        """Whether the blobs are in the store."""
        sealing = self._sealing
        return sealing is not None and sealing.done() and not sealing.cancelled() and sealing.exception() is None

    @property
    def repaired_echoes(self) -> int:
        """Recorded answers that came back in another form."""
        return self._conversation.distinct(self._samples.repaired)

    @property
    def retained_bytes(self) -> int:
        """Size of the turns in memory."""
        return self._samples.nbytes

    @property
    def spooled_bytes(self) -> int:
        """Size of the files."""
        return self._spool.nbytes

    def token_ids(self) -> Ids:
        """Prompt and completion of the last turn, by arrival."""
        return self._samples.ids(self._samples.by_arrival()[-1]) if self.turns else np.empty(0, np.int32)

    def sample_ids(self) -> list[Ids]:
        """The tokens of each sample."""
        order, tree = self._samples.by_arrival(), self._tree()
        return [self._samples.ids(order[sample.turns[-1]]) for sample in tree.samples]

    async def records(self) -> list[bytes]:
        """The record committed with each turn; in linear mode without discarded turns."""
        self._require_open()
        turns = self._conversation.current() if self.settings.mode is Mode.LINEAR else range(self.turns)
        return await in_file_thread(self._spool.records, turns)

    async def place(self) -> None:
        """Wait until a further chat can be claimed, if chats may wait."""
        await self._arrivals.wait()

    @contextlib.contextmanager
    def claim(self) -> Generator[Claim]:
        """Claim a place for one chat, before its request is read and until it is committed. NotFound if the session
        is closed, Busy if there is no place."""
        self._require_open()
        with self._arrivals.claim() as claim:
            yield claim

    def prepare(self, claim: Claim, messages: object = None, *, agent: str = "", request_id: bytes = b"") -> Prepared:
        """Validate a request against the conversation, and number it. `messages` may be digested already; None for
        token-in/token-out. `request_id` is a digest by which the request is recognised if it is sent again."""
        self._require_open()
        self._require_claim(claim)
        if messages is None:
            request = self._conversation.request(START.turn, [])
        else:
            request = self._conversation.prepare(messages, agent=agent)
            self._require_room(request)
        history_ids, answer_from, routes_from = self._samples.history(request.parent.turn)
        return Prepared(
            request=request,
            arrival=self._arrivals.arrive(claim, request_id),
            history_ids=history_ids,
            answer_from=answer_from,
            routes_from=routes_from,
            open_turns=self._samples.open_samples(),
            route_format=self._route_format,
        )

    async def restored(self, prepared: Prepared, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages of a prepared request with the recorded answers in place of their echoes."""
        if not prepared.request.repairs:
            return messages
        positions, turns = zip(*prepared.request.repairs, strict=True)
        answers = await in_file_thread(self._spool.answers, turns)
        return restored(messages, dict(zip(positions, answers, strict=True)))

    async def commit(
        self,
        claim: Claim,
        prepared: Prepared,
        turn: Turn,
        metadata: TurnMetadata = NO_METADATA,
        *,
        record: bytes = b"",
        seen: bool = True,
        key: str = "",
    ) -> bool:
        """Record a turn; `claim.turn` is then its number. Returns False if the session was sealed or closed
        meanwhile. Once started, it completes even if the caller is cancelled. On an error nothing of the turn
        remains. If the answer is not yet `seen`, `see` follows. `key` is the request's idempotency key."""
        self._require_claim(claim)
        recording = asyncio.create_task(self._record(claim, prepared, turn, metadata, record, seen=seen, key=key))
        self._recordings.add(recording)
        try:
            return await run_to_completion(recording)
        finally:
            self._recordings.discard(recording)

    def see(self, turn: int) -> None:
        """Note that the answer of a turn reached its caller. `save_seen` makes that durable."""
        self._unseen.see(turn)

    async def save_seen(self) -> None:
        """Write the turns that `see` noted. A commit that is writing includes them, or this is called after it."""
        if self._state is State.OPEN and self._unseen.unsaved and not self._commits.locked():
            await run_to_completion(asyncio.create_task(self._save_seen()))

    @property
    def has_unsaved(self) -> bool:
        return bool(self._unseen.unsaved) and not self._is_closed()

    def recorded_turn(self, request_id: bytes, key: str) -> int | None:
        """The newest turn of an equal request with an equal key. Without a key, unseen turns come first."""
        return self._requests.find(request_id, key, prefer=self._unseen.turns)

    @property
    def unseen_turns(self) -> int:
        """Number of turns whose answers no client is known to have."""
        return len(self._unseen.turns.difference(self._conversation.parents()))

    def is_unseen(self, turn: int) -> bool:
        return turn in self._unseen.turns

    def has_lost(self, request_id: bytes) -> bool:
        """Whether a chat of an equal request failed and was not sent again."""
        return self._arrivals.has_lost(request_id)

    async def record_of(self, turn: int) -> bytes:
        return (await in_file_thread(self._spool.records, [turn]))[0]

    def arrival_of(self, turn: int) -> int:
        return self._samples.turns[turn].arrival

    def turn_of(self, arrival: int) -> int | None:
        """The recorded turn of the request with this number."""
        return next((turn for turn in range(self.turns) if self.arrival_of(turn) == arrival), None)

    async def messages_until(self, turn: int) -> list[Message]:
        """The conversation up to and including a turn's answer."""
        return await in_file_thread(self._spool.messages, self._conversation.path_to(turn))

    def unrecorded(self, messages: DigestedMessages) -> Prepared:
        """A request outside the conversation. It gets no number and is not committed."""
        return Prepared(
            request=ConversationRequest(parent=START, appended=messages.messages, forms=messages.forms),
            arrival=NO_ARRIVAL,
            history_ids=np.empty(0, np.int32),
            answer_from=0,
            routes_from=0,
            open_turns={},
            route_format=self._route_format,
        )

    @property
    def chats_left_out(self) -> int:
        """Number of chats whose records are kept outside the recording."""
        return self._spool.chats_left_out

    async def leave_out(self, record: bytes) -> None:
        """Keep the record of a chat that was prepared by `unrecorded`."""
        async with self._commits:
            if self._state is State.OPEN:
                await run_to_completion(asyncio.create_task(in_file_thread(self._spool.write_left_out, record)))

    async def records_left_out(self) -> list[bytes]:
        self._require_open()
        return await in_file_thread(self._spool.left_out)

    async def seal(
        self,
        *,
        error: str = "",
        fields: FieldValues = NO_FIELDS,
        version_after: VersionAfter | None = None,
        spans: Sequence[TimedSpan] = (),
        save: Callable[[Recorded], None] = lambda _: None,
    ) -> Recorded:
        """Write the blobs. Later calls return the same result; after a failure the session is open
        again.

        `version_after` settles versions that responses did not state. `spans` are the rollout's
        activities beside its turns. `save` gets the result in a thread, before the log is removed:
        after a kill, that log could be sealed again.
        """
        if self._sealing is None:
            self._require_open()
            if self._arrivals.in_flight:
                raise Busy(BUSY)
            if not self.turns:
                left_out = f" ({self.chats_left_out} chats were left out)" if self.chats_left_out else ""
                raise NothingToTrain(
                    f"session {self.settings.session} recorded no turn{left_out}: there is nothing to train on"
                )
            self._state = State.SEALED
            write = partial(self._write_blobs, error, fields, spans, save)
            self._sealing = asyncio.create_task(self._seal(write, version_after))
        return await asyncio.shield(self._sealing)

    async def close(self) -> None:
        """Remove everything that is not sealed. A turn being recorded is discarded."""
        if self._is_closed():
            raise self._not_found()
        self._state = State.CLOSED
        self._arrivals.end()
        await run_to_completion(asyncio.create_task(self._discard()))

    async def _discard(self) -> None:
        if under_way := [*self._recordings, *([self._sealing] if self._sealing else [])]:
            await asyncio.wait(under_way)
        await in_file_thread(self._spool.discard)

    async def _record(
        self,
        claim: Claim,
        prepared: Prepared,
        turn: Turn,
        metadata: TurnMetadata,
        record: bytes,
        *,
        seen: bool,
        key: str,
    ) -> bool:
        async with self._commits:
            if self._state is not State.OPEN:
                return False
            # The entry is matched with the turns that were committed since it was prepared.
            answer: Message = {"role": "assistant", **orjson.loads(turn.message)} if turn.message else {}
            request = prepared.request
            checkpoint = self._conversation.checkpoint_after(
                request, answer, arrival=prepared.arrival, agent=metadata.agent
            )
            delta, rows = self._samples.place(turn, metadata, arrival=prepared.arrival, read_with=prepared.open_turns)
            entry = LogEntry(
                delta=delta,
                parent=checkpoint.parent,
                appended=orjson.dumps(request.appended),
                answer=orjson.dumps(answer),
                record=record,
                echo=request.echo if request.echo != request.parent.answer else b"",
                repaired=tuple(sorted({turn for _, turn in request.repairs} - self._samples.repaired)),
                seen=seen,
                seen_before=tuple(self._unseen.unsaved),
                request=claim.request,
                key=key,
                beside=self._arrivals.earlier(prepared.arrival),
            )
            await in_file_thread(self._spool.write, entry, rows)
            if self._is_closed():
                return False
            claim.turn = self.turns
            self._samples.add(entry.delta, turn.sequence)
            self._samples.repaired.update(entry.repaired)
            self._conversation.commit(checkpoint)
            self._arrivals.record(prepared.arrival)
            self._unseen.add(claim.turn, seen=seen)
            self._unseen.saved(entry.seen_before)
            self._requests.add(claim.turn, entry.request, key)
            if turn.routes:
                self._route_format = turn.routes.format
            return True

    async def _save_seen(self) -> None:
        async with self._commits:
            turns = tuple(self._unseen.unsaved)
            if self._state is State.OPEN and turns:
                await in_file_thread(self._spool.write_seen, turns)
                self._unseen.saved(turns)

    def _tree(self) -> SampleTree:
        parents = self._conversation.parents()
        unseen = frozenset(self._unseen.turns.difference(parents))
        return sample_tree(self._samples, parents, unseen=unseen, repaired_echoes=self.repaired_echoes)

    async def _seal(self, write: Callable[[], Recorded], version_after: VersionAfter | None) -> Recorded:
        try:
            await self._settle_versions(version_after)
            return await in_file_thread(write)
        except BaseException:
            self._sealing = None
            if not self._is_closed():
                self._state = State.OPEN
            raise

    def _write_blobs(
        self, error: str, fields: FieldValues, spans: Sequence[TimedSpan], save: Callable[[Recorded], None]
    ) -> Recorded:
        """Write the blobs, in a thread: sealed turns do not change, and a tree of 128 samples takes milliseconds."""
        tree, order = self._tree(), self._samples.by_arrival()
        paths = [self._conversation.path_to(order[sample.turns[-1]]) for sample in tree.samples]
        columns, experts = self._spool.seal(tree, paths, error=error, fields=fields, spans=spans)
        sealed = recorded(tree, columns, experts)
        save(sealed)
        self._spool.finish()
        return sealed

    async def _settle_versions(self, version_after: VersionAfter | None) -> None:
        for index in self._samples.unsettled():
            turn = self._samples.turns[index]
            assert turn.answered_at is not None
            ask = version_after and version_after(turn.engine, turn.version_first, turn.answered_at)
            self._samples.settle_version(index, await ask if ask else None)

    def _is_closed(self) -> bool:
        return self._state is State.CLOSED

    def _require_open(self) -> None:
        if self._state is not State.OPEN:
            raise self._not_found()

    def _require_room(self, request: ConversationRequest) -> None:
        """A truncated turn cannot be extended: a later sample could only repeat it as context."""
        if request.parent is not START and self._samples.turns[request.parent.turn].truncated:
            limit = self.settings.max_seq_len
            raise ContextFull(f"the conversation has reached policy.max_seq_len ({limit}): end it here")

    def _require_claim(self, claim: Claim) -> None:
        if not self._arrivals.holds(claim):
            raise Invariant(f"session {self.settings.session}: the caller does not hold its claim")

    def _not_found(self) -> NotFound:
        return NotFound(f"session not found: session_id={self.settings.session}")

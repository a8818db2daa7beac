"""A session: one conversation with the policy, recorded turn by turn. No HTTP here; both doors use it.

State changes only in plain functions on the loop's thread, so each change is whole and no lock is ever held across an
await; files are written in threads, by whoever holds the session's one slot. A turn is in memory only if it is on disk.
"""

import asyncio
import contextlib
import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import orjson
from numpy.typing import NDArray

from penstock.errors import Busy, ContextFull, Invariant, NotFound, NothingToTrain
from penstock.recording.conversation import START, Conversation, Mode, Request
from penstock.recording.samples import Samples
from penstock.recording.spool import SessionSettings, Spool
from penstock.recording.turn_log import Entry
from penstock.runtime.cancellation import run_to_completion
from penstock.runtime.offload import in_file_thread
from penstock.store import BlobRef, Store
from penstock.turn import ANY_FORMAT, Ids, Message, OpenSample, RouteFormat, Turn, TurnMetadata

log = logging.getLogger(__name__)

ORDINARY = TurnMetadata()


class State(StrEnum):
    OPEN = "open"
    SEALED = "sealed"  # its blobs are being written, or were
    CLOSED = "closed"


class Claim:
    """The slot of a session, while it is taken."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is needed to send a request and to read its answer."""

    request: Request
    turns: int
    """Committed turns when this was prepared."""
    history_ids: Ids
    """Linear mode: tokens of the conversation so far, to which those of `request.appended` are added."""
    answer_from: int
    """Where the last answer begins in `history_ids`."""
    routes_from: int
    """The first routed row to ask for, where the prompt that is sent begins with `history_ids`."""
    open_samples: Sequence[OpenSample]
    """For `read_turn`, as is the next."""
    route_format: RouteFormat


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """A recorded rollout."""

    columns: BlobRef
    experts: BlobRef | None
    """None when no routed rows came."""
    sample_lengths: tuple[int, ...]
    turns: int
    prompt_tokens: int
    """Of the turns that began a sample."""
    completion_tokens: int
    version_first: int
    version_last: int
    truncated: bool
    metrics: Mapping[str, float]


class Session:
    def __init__(self, spool: Spool, *, route_format: RouteFormat = ANY_FORMAT) -> None:
        self.settings = spool.settings
        self._spool = spool
        self._samples = Samples(max_samples=self.settings.max_samples)
        self._conversation = Conversation(mode=self.settings.mode, append_roles=frozenset(self.settings.append_roles))
        self._route_format = route_format
        self._state = State.OPEN
        self._claim: Claim | None = None
        self._recording: asyncio.Task[bool] | None = None
        self._sealing: asyncio.Task[Sealed] | None = None

    @classmethod
    async def start(
        cls, store: Store, settings: SessionSettings, *, route_format: RouteFormat = ANY_FORMAT
    ) -> "Session":
        return cls(await in_file_thread(Spool.create, store, settings), route_format=route_format)

    @classmethod
    async def recover(cls, store: Store, key: str, *, route_format: RouteFormat = ANY_FORMAT) -> "Session":
        """The session that another process recorded at `key`, with every turn that it committed."""
        return await in_file_thread(cls._recovered, store, key, route_format)

    @classmethod
    def _recovered(cls, store: Store, key: str, route_format: RouteFormat) -> "Session":
        spool, entries = Spool.recover(store, key)
        session = cls(spool, route_format=route_format)
        for entry in entries:
            session._samples.add(entry.delta)
            request = session._conversation.request(entry.parent, orjson.loads(entry.appended))
            session._conversation.commit(session._conversation.answered(request, orjson.loads(entry.answer)))
        return session

    @property
    def turns(self) -> int:
        return len(self._samples.turns)

    @property
    def busy(self) -> bool:
        """Whether somebody holds the slot, or its blobs are being written."""
        return self._claim is not None or (self._sealing is not None and not self._sealing.done())

    @property
    def sealed(self) -> bool:
        """Whether its blobs are in the store, and belong to whoever asked for them."""
        sealing = self._sealing
        return sealing is not None and sealing.done() and not sealing.cancelled() and sealing.exception() is None

    @property
    def retained_bytes(self) -> int:
        """Of the turns in memory."""
        return self._samples.nbytes

    @property
    def spooled_bytes(self) -> int:
        """Of its files."""
        return self._spool.nbytes

    def token_ids(self) -> Ids:
        """The sample that the last turn belongs to, up to its end."""
        return self._samples.ids(self.turns - 1) if self.turns else np.empty(0, np.int32)

    async def records(self) -> list[bytes]:
        """What was committed with each turn; in linear mode without those that were discarded."""
        self._require_open()
        turns = self._conversation.line() if self.settings.mode is Mode.LINEAR else range(self.turns)
        return await in_file_thread(self._spool.records, turns)

    @contextlib.contextmanager
    def claim(self) -> Generator[Claim]:
        """The one slot, for a chat from before its request is read until it is committed. Closing beats busy."""
        self._require_open()
        if self._claim is not None:
            raise Busy("session already has an in-flight chat completion")
        claim = self._claim = Claim()
        try:
            yield claim
        finally:
            self._claim = None

    def prepare(self, claim: Claim, messages: object = None) -> Prepared:
        """Checks a request, changes nothing. `messages` may be digested already; without any, only tokens go in and
        out."""
        self._require_open()
        self._require_slot(claim)
        if messages is None:
            request = self._conversation.request(self.turns - 1, [])
        else:
            request = self._conversation.prepare(messages)
            self._require_room(request)
        history_ids, answer_from, routes_from = self._history(request)
        return Prepared(
            request=request,
            turns=self.turns,
            history_ids=history_ids,
            answer_from=answer_from,
            routes_from=routes_from,
            open_samples=self._samples.open_samples(),
            route_format=self._route_format,
        )

    async def commit(
        self,
        claim: Claim,
        prepared: Prepared,
        turn: Turn,
        metadata: TurnMetadata = ORDINARY,
        *,
        record: bytes = b"",
    ) -> bool:
        """Whether the turn was recorded: it is not when the session was closed meanwhile. Once begun it is finished,
        even when the caller is cancelled; on any error nothing of it remains. `record` is kept for `records`."""
        self._require_slot(claim)
        self._recording = asyncio.create_task(self._record(prepared, turn, metadata, record))
        try:
            return await run_to_completion(self._recording)
        finally:
            self._recording = None

    async def seal(self, *, error: str = "", extras: Mapping[str, NDArray[np.float32]] | None = None) -> Sealed:
        """Writes the blobs, once: who asks again gets the same answer. After a failure the session is open again."""
        if self._sealing is None:
            self._require_open()
            if self._claim is not None:
                raise Busy("session already has an in-flight chat completion")
            if not self.turns:
                raise NothingToTrain(f"session {self.settings.session} recorded no turn: there is nothing to train on")
            self._state = State.SEALED
            self._sealing = asyncio.create_task(self._seal(error, extras or {}))
        return await asyncio.shield(self._sealing)

    async def close(self) -> None:
        """Removes what is not sealed. A turn under way is not recorded any more."""
        if self._is_closed():
            raise self._not_found()
        self._state = State.CLOSED
        await run_to_completion(asyncio.create_task(self._discard()))

    async def _discard(self) -> None:
        if under_way := [task for task in (self._recording, self._sealing) if task]:
            await asyncio.wait(under_way)
        await in_file_thread(self._spool.discard)

    def _history(self, request: Request) -> tuple[Ids, int, int]:
        if self.settings.mode is Mode.OPEN or request.parent is START:
            return np.empty(0, np.int32), 0, 0
        turn = request.parent.turn
        parent = self._samples.turns[turn]
        extends = self._samples.last_turns()[parent.sample] == turn
        ids = self._samples.ids(turn)
        routes_from = self._samples.open_samples()[parent.sample].rows_from if extends else 0
        return ids, len(ids) - len(parent.completion_ids), routes_from

    async def _record(self, prepared: Prepared, turn: Turn, metadata: TurnMetadata, record: bytes) -> bool:
        if self._is_closed():
            return False
        if self.turns != prepared.turns:
            session = self.settings.session
            log.error("action=invariant session=%s turns=%d prepared=%d", session, self.turns, prepared.turns)
            raise Invariant(f"session {session} has {self.turns} turns; the request was prepared with {prepared.turns}")
        answer: Message = {"role": "assistant", **orjson.loads(turn.message)} if turn.message else {}
        checkpoint = self._conversation.answered(prepared.request, answer)
        delta, rows = self._samples.place(turn, metadata)
        entry = Entry(
            delta=delta,
            parent=prepared.request.parent.turn,
            appended=orjson.dumps(prepared.request.appended),
            answer=orjson.dumps(answer),
            record=record,
        )
        await in_file_thread(self._spool.write, entry, rows)
        if self._is_closed():
            return False
        self._samples.add(delta, turn.sequence)
        self._conversation.commit(checkpoint)
        if turn.routes:
            self._route_format = turn.routes.format
        return True

    async def _seal(self, error: str, extras: Mapping[str, NDArray[np.float32]]) -> Sealed:
        turns = self._samples.turns
        lines = [self._conversation.line(turn) for turn in self._samples.last_turns()]
        try:
            columns, experts = await in_file_thread(self._spool.seal, self._samples, lines, error=error, extras=extras)
        except BaseException:
            self._sealing = None
            if not self._is_closed():
                self._state = State.OPEN
            raise
        return Sealed(
            columns=columns,
            experts=experts,
            sample_lengths=tuple(self._samples.lengths()),
            turns=len(turns),
            prompt_tokens=sum(len(turn.prompt_ids) for turn in turns if not turn.prefix_tokens),
            completion_tokens=sum(len(turn.completion_ids) for turn in turns),
            version_first=min(turn.version_first for turn in turns),
            version_last=max(turn.version_last for turn in turns),
            truncated=any(turn.truncated for turn in turns),
            metrics=self._samples.metrics(),
        )

    def _is_closed(self) -> bool:
        return self._state is State.CLOSED

    def _require_open(self) -> None:
        if self._state is not State.OPEN:
            raise self._not_found()

    def _require_room(self, request: Request) -> None:
        """Behind a turn that was cut, a sample could only repeat it as context."""
        if request.parent is not START and self._samples.turns[request.parent.turn].truncated:
            raise ContextFull(f"the conversation has reached max_seq_len ({self.settings.max_seq_len}): end it here")

    def _require_slot(self, claim: Claim) -> None:
        if self._claim is not claim:
            raise Invariant(f"session {self.settings.session}: only whoever holds the slot may use it")

    def _not_found(self) -> NotFound:
        return NotFound(f"session not found: session_id={self.settings.session}")

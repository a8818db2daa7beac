"""A session: one conversation with the policy, recorded turn by turn. Rollouts and the session server use it.

State changes only in synchronous functions on the loop's thread, so no lock is held across an await. Files are written
in threads by the holder of the session's claim. A turn is in memory only if it is on disk.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import orjson

from penstock.errors import Busy, ContextFull, Invariant, NotFound, NothingToTrain
from penstock.fields import NO_FIELDS, FieldValues
from penstock.recording.conversation import START, Conversation, ConversationRequest, Mode
from penstock.recording.samples import Samples
from penstock.recording.spool import SessionSettings, Spool
from penstock.recording.turn_log import LogEntry
from penstock.runtime.cancellation import run_to_completion
from penstock.runtime.offload import in_file_thread
from penstock.store import BlobRef, Store
from penstock.turn import (
    ANY_FORMAT,
    HIT_MAX_TOKENS,
    Ids,
    Message,
    OpenSample,
    RouteFormat,
    SaidVersion,
    Turn,
    TurnMetadata,
)

logger = logging.getLogger(__name__)

NO_METADATA = TurnMetadata()
VersionAfter = Callable[[str, int, float], Awaitable[SaidVersion | None]]
"""Engine, version before the request, time of the response -> what the replica said after it (`Replicas.after`)."""


class State(StrEnum):
    OPEN = "open"
    SEALED = "sealed"  # its blobs are written or being written
    CLOSED = "closed"


class Claim:
    """Exclusive use of a session for one chat."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is needed to send a request and to read its response."""

    request: ConversationRequest
    turns: int
    """Number of committed turns when this was prepared."""
    history_ids: Ids
    """Linear mode: tokens of the conversation before `request.appended`."""
    answer_from: int
    """Position of the last answer in `history_ids`."""
    routes_from: int
    """First routed row to request, provided that the prompt begins with `history_ids`."""
    open_samples: Sequence[OpenSample]
    """For `read_turn`."""
    route_format: RouteFormat
    """For `read_turn`."""


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """A recorded rollout."""

    columns: BlobRef
    experts: BlobRef | None
    """None if no routed rows were received."""
    sample_lengths: tuple[int, ...]
    turns: int
    prompt_tokens: int
    """Of the turns that started a sample."""
    completion_tokens: int
    version_first: int
    """The lowest policy version that may have sampled one of its tokens."""
    version_last: int
    """The highest one."""
    truncated: bool
    hit_max_tokens: bool = False
    """Whether a limit of tokens ended the last turn."""
    metrics: Mapping[str, float]
    inexact_tokens: int = 0
    """Completion tokens whose version is a range, or was not said by the engine."""
    agents: Mapping[str, int] = field(default_factory=dict[str, int])
    """Completion tokens of each agent that the environment named, in the order of their first turns."""


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
        """The session that another process recorded at `key`, with all its committed turns."""
        return await in_file_thread(cls._recovered, store, key, route_format)

    @classmethod
    def _recovered(cls, store: Store, key: str, route_format: RouteFormat) -> "Session":
        spool, entries = Spool.recover(store, key)
        session = cls(spool, route_format=route_format)
        for entry in entries:
            session._samples.add(entry.delta)
            request = session._conversation.request(entry.parent, orjson.loads(entry.appended))
            session._conversation.commit(session._conversation.checkpoint_after(request, orjson.loads(entry.answer)))
        return session

    @property
    def turns(self) -> int:
        return len(self._samples.turns)

    @property
    def busy(self) -> bool:
        """Whether a chat is in flight, or the blobs are being written."""
        return self._claim is not None or (self._sealing is not None and not self._sealing.done())

    @property
    def sealed(self) -> bool:
        """Whether the blobs are in the store."""
        sealing = self._sealing
        return sealing is not None and sealing.done() and not sealing.cancelled() and sealing.exception() is None

    @property
    def retained_bytes(self) -> int:
        """Size of the turns in memory."""
        return self._samples.nbytes

    @property
    def spooled_bytes(self) -> int:
        """Size of the files."""
        return self._spool.nbytes

    def token_ids(self) -> Ids:
        """The sample of the last turn."""
        return self._samples.ids(self.turns - 1) if self.turns else np.empty(0, np.int32)

    def sample_ids(self) -> list[Ids]:
        """The tokens of each sample."""
        return [self._samples.ids(turn) for turn in self._samples.last_turns()]

    async def records(self) -> list[bytes]:
        """The record committed with each turn; in linear mode without discarded turns."""
        self._require_open()
        turns = self._conversation.path_to() if self.settings.mode is Mode.LINEAR else range(self.turns)
        return await in_file_thread(self._spool.records, turns)

    @contextlib.contextmanager
    def claim(self) -> Generator[Claim]:
        """Claim the session for one chat, from before its request is read until it is committed. NotFound if the
        session is closed, Busy if it is claimed."""
        self._require_open()
        self._require_unclaimed()
        claim = self._claim = Claim()
        try:
            yield claim
        finally:
            self._claim = None

    def prepare(self, claim: Claim, messages: object = None) -> Prepared:
        """Validate a request against the conversation. No side effects. `messages` may be digested already; None for
        token-in/token-out."""
        self._require_open()
        self._require_claim(claim)
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
        metadata: TurnMetadata = NO_METADATA,
        *,
        record: bytes = b"",
    ) -> bool:
        """Record a turn. Returns False if the session was closed meanwhile. Once started, it completes even if the
        caller is cancelled; on an error nothing of the turn remains. `record` is returned by `records`."""
        self._require_claim(claim)
        self._recording = asyncio.create_task(self._record(prepared, turn, metadata, record))
        try:
            return await run_to_completion(self._recording)
        finally:
            self._recording = None

    async def seal(
        self, *, error: str = "", fields: FieldValues = NO_FIELDS, version_after: VersionAfter | None = None
    ) -> Sealed:
        """Write the blobs. Later calls return the same result; after a failure the session is open again.

        `version_after` settles the versions of turns whose responses did not state them.
        """
        if self._sealing is None:
            self._require_open()
            self._require_unclaimed()
            if not self.turns:
                raise NothingToTrain(f"session {self.settings.session} recorded no turn: there is nothing to train on")
            self._state = State.SEALED
            self._sealing = asyncio.create_task(self._seal(error, fields, version_after))
        return await asyncio.shield(self._sealing)

    async def close(self) -> None:
        """Remove everything that is not sealed. A turn being recorded is discarded."""
        if self._is_closed():
            raise self._not_found()
        self._state = State.CLOSED
        await run_to_completion(asyncio.create_task(self._discard()))

    async def _discard(self) -> None:
        if under_way := [task for task in (self._recording, self._sealing) if task]:
            await asyncio.wait(under_way)
        await in_file_thread(self._spool.discard)

    def _history(self, request: ConversationRequest) -> tuple[Ids, int, int]:
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
            logger.error("action=invariant session=%s turns=%d prepared=%d", session, self.turns, prepared.turns)
            raise Invariant(f"session {session} has {self.turns} turns; the request was prepared with {prepared.turns}")
        answer: Message = {"role": "assistant", **orjson.loads(turn.message)} if turn.message else {}
        checkpoint = self._conversation.checkpoint_after(prepared.request, answer)
        delta, rows = self._samples.place(turn, metadata)
        entry = LogEntry(
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

    async def _seal(self, error: str, fields: FieldValues, version_after: VersionAfter | None) -> Sealed:
        paths = [self._conversation.path_to(turn) for turn in self._samples.last_turns()]
        try:
            await self._settle_versions(version_after)
            columns, experts = await in_file_thread(self._spool.seal, self._samples, paths, error=error, fields=fields)
        except BaseException:
            self._sealing = None
            if not self._is_closed():
                self._state = State.OPEN
            raise
        turns = self._samples.turns
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
            hit_max_tokens=turns[-1].finish_reason == HIT_MAX_TOKENS,
            metrics=self._samples.metrics(),
            inexact_tokens=self._samples.inexact_tokens(),
            agents=self._samples.tokens_by_agent(),
        )

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

    def _require_unclaimed(self) -> None:
        if self._claim is not None:
            raise Busy("session already has an in-flight chat completion")

    def _require_claim(self, claim: Claim) -> None:
        if self._claim is not claim:
            raise Invariant(f"session {self.settings.session}: the caller does not hold its claim")

    def _not_found(self) -> NotFound:
        return NotFound(f"session not found: session_id={self.settings.session}")

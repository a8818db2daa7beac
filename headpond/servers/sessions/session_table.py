"""The sessions of a server by id: create, find, recover after a restart, seal, expire, delete.

All state changes happen on the loop's thread. Sessions of an earlier process are recovered from disk at their first
request.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
import orjson

from headpond import ids
from headpond.config import RunConfig
from headpond.errors import BadRequest, BlobError, Expired, Full, NotFound
from headpond.event_loop.offload import in_io_thread
from headpond.fields import FieldValues
from headpond.playing.posted_scores import POSTED, read_posted
from headpond.recording import Echo, Mode, Session, SessionSettings
from headpond.recording.session import VersionAfter
from headpond.records.rollout import Recorded
from headpond.servers.sessions.headers import digest, new_secret
from headpond.servers.sessions.requests import NewSession, SealRequest
from headpond.servers.sessions.session_directory import SessionDirectory
from headpond.servers.sessions.session_entry import Entry, SealedSession, SessionMetadata

logger = logging.getLogger("headpond.sessions")

# Requests for an expired session get 410 for this long, 404 later.
EXPIRED_S = 3600.0
# Limit for remembered ids of expired sessions: 20 MB of ids and times.
MAX_EXPIRED = 100_000
# Limit for sessions whose files could not be removed and are tried again. A restart finds the others.
MAX_UNDELETED = 10_000
# Sessions tried again in one check: about 10 ms of a thread.
DELETED_AT_ONCE = 64
# Answers written in this time are noted together. A turn that follows notes them by itself.
SAVE_SEEN_S = 0.02
# Interval of the check for idle and overdue sessions.
CHECK_S = 1.0


@dataclass(kw_only=True)
class Counts:
    created: int = 0
    recovered: int = 0
    sealed: int = 0
    deleted: int = 0
    expired: int = 0


class SessionTable:
    def __init__(self, directory: SessionDirectory, config: RunConfig, recoverable: list[str]) -> None:
        self.counts = Counts()
        self._directory = directory
        self._config = config
        self._settings = config.sessions
        deadline = time.monotonic() + self._settings.lifetime_s
        self._entries = {id: Entry(id=id, deadline=deadline) for id in recoverable}  # oldest first
        self._expired: OrderedDict[str, float] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()
        self._undeleted: OrderedDict[str, None] = OrderedDict()
        self._seen: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def retained_bytes(self) -> int:
        return sum(entry.session.retained_bytes for entry in self._entries.values() if entry.session)

    @property
    def expired(self) -> int:
        return len(self._expired)

    async def create(self, new: NewSession) -> tuple[Entry, str, str]:
        """The session, its secret for chats and its control secret. Only digests of them are kept."""
        if len(self._entries) >= self._settings.max_sessions:
            raise Full(f"there are {len(self._entries)} sessions: delete some, or raise sessions.max_sessions")
        id, secret, control = secrets.token_hex(16), new_secret(), new_secret()
        metadata = SessionMetadata(
            secret_digest=digest(secret),
            control_digest=digest(control),
            sampling=new.sampling,
            created_at=time.time(),
            files_key=_files_key(new),
            forced=({"model": new.model} if new.model else {}) | new.forced,
        )
        entry = Entry(id=id, metadata=metadata, deadline=time.monotonic() + self._settings.lifetime_s)
        self._entries[id] = entry  # counts while its files are created
        try:
            entry.session = await Session.start(
                self._directory.store,
                self._session_settings(id, new, metadata),
                route_format=self._config.engine.route_format,
            )
        except BaseException:
            self._forget(entry)
            self._in_background(self._close(entry))
            raise
        self.counts.created += 1
        return entry, secret, control

    async def post_score(self, entry: Entry, body: bytes) -> None:
        """Add to the session's score. It is on disk when this returns."""
        async with entry.scoring:
            session = opened(entry)
            if entry.sealing and not entry.sealing.done():
                raise not_found(entry.id)
            posted = read_posted(body, entry.score)
            if posted.turn_rewards is not None and len(posted.turn_rewards) > session.turns:
                raise BadRequest(
                    f"turn_rewards has {len(posted.turn_rewards)} rewards: the session has {session.turns} turns"
                )
            await in_io_thread(self._directory.save_score, entry.id, msgspec.json.encode(posted))
            entry.score = posted

    async def find(self, id: str) -> Entry:
        """The session, recovered if need be. Raises NotFound or Expired. The caller authorizes the request, then calls
        `touch`."""
        entry = self._entries.get(id)
        if entry is None:
            raise self.gone(id)
        if entry.session is None and entry.sealed is None:
            await self._open(entry)
            self._expire_if_large(entry)
        return entry

    def touch(self, entry: Entry) -> None:
        """Note the session as just used. Expires it if its files exceed sessions.session_bytes."""
        if self._entries.get(entry.id) is not entry:
            return
        entry.used_at = time.monotonic()
        self._expire_if_large(entry)

    def _expire_if_large(self, entry: Entry) -> None:
        known = self._entries.get(entry.id) is entry
        if entry.session and known and entry.session.spooled_bytes > self._settings.session_bytes:
            self._expire(entry, "bytes")

    def see(self, entry: Entry, turn: int) -> None:
        """Note that an answer was wholly written to its client. The session's log has the note soon after."""
        if entry.session is None:
            return
        entry.session.see(turn)
        if not self._seen:
            self._in_background(self._save_seen())
        self._seen[entry.id] = entry

    async def _save_seen(self) -> None:
        while self._seen:
            await asyncio.sleep(SAVE_SEEN_S)
            for id, entry in list(self._seen.items()):
                try:
                    if entry.session is not None:
                        await entry.session.save_seen()
                except (BlobError, OSError) as error:
                    logger.warning("action=not_saved session=%s error=%r: tried with its next turn", id, error)
                    del self._seen[id]
                    continue
                if entry.session is None or not entry.session.has_unsaved:
                    del self._seen[id]

    async def seal(self, entry: Entry, seal: SealRequest, *, version_after: VersionAfter) -> bytes:
        """Seal the session; its requests in flight are abandoned. Idempotent: later calls return the first result."""
        if entry.sealed is None and (entry.sealing is None or entry.sealing.done()):
            entry.sealing = asyncio.create_task(self._seal(entry, opened(entry), seal, version_after))
        if entry.sealing:
            await asyncio.shield(entry.sealing)
        assert entry.sealed is not None
        return entry.sealed

    async def _seal(self, entry: Entry, session: Session, seal: SealRequest, version_after: VersionAfter) -> None:
        declared = self._config.batch.fields_of("turn")
        async with entry.scoring:  # a score that is being written is part of it; later ones are refused
            posted = entry.score
        rewards = posted.turn_rewards if seal.turn_rewards is None else seal.turn_rewards
        if rewards is not None and len(rewards) != session.turns:
            raise BadRequest(
                f"turn_rewards has {len(rewards)} rewards for {session.turns} turns: send one for each turn"
            )
        fields = FieldValues(declared=declared, required=not seal.error, turn_rewards=rewards)
        metadata, usage = entry.metadata, entry.usage
        assert metadata is not None

        def save(recorded: Recorded) -> None:
            metrics = {**recorded.metrics, "engine_aborts": float(entry.aborts)}
            answer = orjson.dumps(
                {
                    **dict(recorded.model_copy(update={"metrics": metrics, "replica_uses": usage.by_replica})),
                    "score": orjson.Fragment(msgspec.json.encode(posted)),
                }
            )
            self._directory.save_sealed(
                entry.id, msgspec.json.encode(SealedSession(metadata=metadata, answer=msgspec.Raw(answer)))
            )
            answers.append(answer)

        answers: list[bytes] = []
        await entry.in_flight.end()
        await session.seal(error=seal.error, fields=fields, version_after=version_after, spans=seal.spans, save=save)
        entry.sealed = answers[-1]
        self.counts.sealed += 1
        entry.session = None

    async def delete(self, entry: Entry) -> None:
        if self._entries.get(entry.id) is not entry:
            raise not_found(entry.id)
        self._forget(entry)
        self.counts.deleted += 1
        await self._close(entry)

    async def watch(self) -> None:
        """Expire idle and overdue sessions until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            now = time.monotonic()
            unused_since = now - self._settings.idle_s
            # Looking at 10,000 sessions takes about 1 ms.
            aged = [entry for entry in self._entries.values() if entry.used_at <= unused_since or entry.deadline <= now]
            for entry in aged:
                if entry.deadline <= now:
                    self._expire(entry, "lifetime")
                elif entry.session is None or not entry.session.busy:
                    self._expire(entry, "idle")
            while self._expired and (next(iter(self._expired.values())) <= now or len(self._expired) > MAX_EXPIRED):
                self._expired.popitem(last=False)
            await self._delete_again()

    async def finish(self) -> None:
        """Wait for sessions that are being closed. Open sessions stay on disk for the next process."""
        while self._closing:
            await asyncio.wait(self._closing)

    def _expire(self, entry: Entry, reason: str) -> None:
        logger.info("action=session_expired session=%s reason=%s", entry.id, reason)
        self._forget(entry)
        self.counts.expired += 1
        self._expired[entry.id] = time.monotonic() + EXPIRED_S
        self._in_background(self._close(entry))

    def _forget(self, entry: Entry) -> None:
        self._entries.pop(entry.id, None)

    async def _close(self, entry: Entry) -> None:
        """Close the session and remove its files; sealed blobs stay. Ends its requests in flight. No blob appears after
        this returns."""
        await entry.in_flight.end()
        if entry.sealing:
            await asyncio.wait([entry.sealing])
        if entry.metadata is None:  # not used since the restart
            with contextlib.suppress(BlobError, OSError, msgspec.DecodeError):
                await self._recover_sealed(entry)
        session = entry.session
        unwanted = entry.sealed is None and (_seals_elsewhere(entry) or not (session and session.sealed))
        if session is not None:
            try:
                await session.close()
            except (BlobError, OSError) as error:
                logger.warning("action=not_closed session=%s error=%r", entry.id, error)
        if unwanted or _seals_elsewhere(entry):
            await self._discard(entry.id)
        elif entry.sealed is not None:
            await self._forget_sealed(entry.id)

    async def _forget_sealed(self, id: str) -> None:
        try:
            await in_io_thread(self._directory.forget_sealed, id)
        except (BlobError, OSError) as error:
            logger.warning("action=sealed_not_removed session=%s error=%r: a restart expires it", id, error)

    async def _discard(self, id: str) -> None:
        try:
            await in_io_thread(self._directory.discard, id)
        except (BlobError, OSError) as error:
            logger.warning("action=not_discarded session=%s error=%r: tried again", id, error)
            self._undeleted[id] = None
            while len(self._undeleted) > MAX_UNDELETED:
                self._undeleted.popitem(last=False)

    async def _delete_again(self) -> None:
        """Remove files that could not be removed. The longest waiting ones first, those that fail again last."""
        for id in list(islice(self._undeleted, DELETED_AT_ONCE)):
            try:
                await in_io_thread(self._directory.discard, id)
            except (BlobError, OSError):
                if id in self._undeleted:  # meanwhile MAX_UNDELETED may have been exceeded
                    self._undeleted.move_to_end(id)
            else:
                self._undeleted.pop(id, None)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _open(self, entry: Entry) -> None:
        if entry.opening is None:
            entry.opening = asyncio.create_task(self._recover(entry))
        await asyncio.shield(entry.opening)
        if entry.session is None and entry.sealed is None:
            raise self.gone(entry.id)

    async def _recover(self, entry: Entry) -> None:
        key, route_format = self._directory.session_key(entry.id), self._config.engine.route_format
        try:
            await self._recover_sealed(entry)
            if entry.sealed is not None:
                return
            session = await Session.recover(self._directory.store, key, route_format=route_format)
            entry.metadata = msgspec.json.decode(session.settings.notes, type=SessionMetadata)
            entry.score = POSTED.decode(await in_io_thread(self._directory.score, entry.id))
        except (BlobError, OSError, msgspec.DecodeError) as error:
            logger.error("action=session_lost session=%s error=%s", entry.id, error)
            if self._entries.get(entry.id) is entry:
                self._expire(entry, "unreadable")
            return
        entry.session = session
        entry.deadline = time.monotonic() + self._settings.lifetime_s - (time.time() - entry.metadata.created_at)
        self.counts.recovered += 1
        logger.info("action=session_recovered session=%s turns=%d", entry.id, session.turns)

    async def _recover_sealed(self, entry: Entry) -> None:
        if kept := await in_io_thread(self._directory.sealed, entry.id):
            sealed = msgspec.json.decode(kept, type=SealedSession)
            entry.metadata, entry.sealed = sealed.metadata, bytes(sealed.answer)

    def gone(self, id: str) -> NotFound | Expired:
        if id in self._expired:
            return Expired(f"session expired: session_id={id}")
        return not_found(id)

    def _session_settings(self, id: str, new: NewSession, metadata: SessionMetadata) -> SessionSettings:
        policy = self._config.policy
        return SessionSettings(
            session=id,
            key=self._directory.session_key(id),
            sealed_key=metadata.files_key,
            rollout=new.rollout or id,
            attempt=new.attempt,
            mode=Mode(self._config.session_mode),
            echo=Echo(self._settings.echo),
            concurrency=self._settings.concurrency,
            queue=self._settings.when_busy == "queue",
            append_roles=self._settings.append_roles,
            max_seq_len=policy.max_seq_len,
            max_samples=policy.max_samples,
            logprobs_mode=self._config.engine.logprobs_mode,
            notes=msgspec.json.encode(metadata).decode(),
        )


def _files_key(new: NewSession) -> str | None:
    if new.execution is None:
        return None
    assert new.run is not None, "checked by read_new_session"
    assert new.rollout is not None
    return ids.execution_directory(new.run, new.rollout, new.attempt, new.execution)


def _seals_elsewhere(entry: Entry) -> bool:
    """Whether nothing in the session's own directory is for its client."""
    return entry.metadata is not None and entry.metadata.files_key is not None


def opened(entry: Entry) -> Session:
    """The session. Raises NotFound if it is sealed."""
    if entry.session is None:
        raise not_found(entry.id)
    return entry.session


def not_found(id: str) -> NotFound:
    return NotFound(f"session not found: session_id={id}")

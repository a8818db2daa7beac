"""The sessions of a server, by id: made, found, brought back after a restart, sealed, expired, forgotten.

All state changes happen on the loop's thread. A session is in memory while it is used; one that an earlier process left
is brought back when somebody asks for it.
"""

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import orjson

from penstock import ids
from penstock.config import RunConfig
from penstock.engines.replicas import Replica
from penstock.errors import BlobError, Expired, Full, NotFound
from penstock.recording import Mode, Sealed, Session, SessionSettings
from penstock.recording.spool import COLUMNS, EXPERTS
from penstock.runtime.offload import in_io_thread
from services.sessions.headers import digest
from services.sessions.requests import NewSession
from services.sessions.shelf import Shelf

logger = logging.getLogger("penstock.sessions")

EXPIRED_S = 3600.0
"""How long an expired session answers 410, then 404."""
EXPIRED_MOST = 100_000
"""Of them; 20 MB of ids and times."""
CHECK_S = 1.0


class Notes(msgspec.Struct, frozen=True, kw_only=True):
    """What the recorder keeps for us, and gives back after a restart."""

    secret_digest: str
    sampling: dict[str, Any]
    created_at: float
    """seconds since 1970"""
    files_key: str | None = None
    """directory of the store that sealed files are put into; default: the session's own"""


@dataclass(kw_only=True, eq=False)
class Entry:
    id: str
    session: Session | None = None
    """None: nobody has asked for it since the restart, or its blobs are sealed"""
    notes: Notes | None = None
    sealed: bytes | None = None
    """what sealing answered"""
    used_at: float = field(default_factory=time.monotonic)
    deadline: float = 0.0
    """by the monotonic clock"""
    home: Replica | None = None
    retained_bytes: int = 0
    opening: asyncio.Task[None] | None = None
    sealing: asyncio.Task[None] | None = None


@dataclass(kw_only=True)
class Counts:
    created: int = 0
    recovered: int = 0
    sealed: int = 0
    deleted: int = 0
    expired: int = 0


class Registry:
    def __init__(self, shelf: Shelf, config: RunConfig, left_behind: list[str]) -> None:
        self.counts = Counts()
        self.retained_bytes = 0
        self._shelf = shelf
        self._config = config
        self._settings = config.sessions
        deadline = time.monotonic() + self._settings.lifetime_s
        self._entries = {id: Entry(id=id, deadline=deadline) for id in left_behind}  # oldest first
        self._by_use = OrderedDict.fromkeys(left_behind)  # longest unused first
        self._expired: OrderedDict[str, float] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def expired(self) -> int:
        return len(self._expired)

    async def create(self, asked: NewSession) -> tuple[Entry, str]:
        """The session, and its secret, of which only a digest is kept."""
        if len(self._entries) >= self._settings.max_sessions:
            raise Full(f"there are {len(self._entries)} sessions: seal or delete some, or raise sessions.max_sessions")
        id, secret = secrets.token_hex(16), secrets.token_urlsafe(32)
        notes = Notes(
            secret_digest=digest(secret), sampling=asked.sampling, created_at=time.time(), files_key=_files_key(asked)
        )
        entry = Entry(id=id, notes=notes, deadline=time.monotonic() + self._settings.lifetime_s)
        self._entries[id] = entry  # counts while its files are made
        self._by_use[id] = None
        try:
            entry.session = await Session.start(
                self._shelf.store,
                self._session_settings(id, asked, notes),
                route_format=self._config.engine.route_format,
            )
        except BaseException:
            self._forget(entry)
            raise
        self.counts.created += 1
        return entry, secret

    async def find(self, id: str) -> Entry:
        """NotFound, Expired, or a session that can be used."""
        entry = self._entries.get(id)
        if entry is None:
            raise self._gone(id)
        if entry.session is None and entry.sealed is None:
            await self._open(entry)
        self.touch(entry)
        return entry

    def touch(self, entry: Entry) -> None:
        """It was just used."""
        if self._entries.get(entry.id) is not entry:
            return
        entry.used_at = time.monotonic()
        self._by_use.move_to_end(entry.id)
        if entry.session:
            self.retained_bytes += entry.session.retained_bytes - entry.retained_bytes
            entry.retained_bytes = entry.session.retained_bytes
            if entry.session.spooled_bytes > self._settings.session_bytes:
                self._expire(entry, "bytes")

    async def seal(self, entry: Entry, error: str) -> bytes:
        """Once; who asks again gets the same answer."""
        if entry.sealed is None and (entry.sealing is None or entry.sealing.done()):
            entry.sealing = asyncio.create_task(self._seal(entry, opened(entry), error))
        if entry.sealing:
            await asyncio.shield(entry.sealing)
        assert entry.sealed is not None
        return entry.sealed

    async def _seal(self, entry: Entry, session: Session, error: str) -> None:
        sealed = await session.seal(error=error)
        entry.sealed = orjson.dumps(await in_io_thread(self._placed, entry, sealed))
        self.counts.sealed += 1
        self._drop_session(entry)

    def _placed(self, entry: Entry, sealed: Sealed) -> Sealed:
        """Its files where the rollout's execution keeps them; nobody has been told of them yet."""
        files_key = entry.notes and entry.notes.files_key
        if not files_key:
            return sealed
        store = self._shelf.store
        columns = store.move(sealed.columns, f"{files_key}/{COLUMNS}")
        experts = sealed.experts and store.move(sealed.experts, f"{files_key}/{EXPERTS}")
        self._shelf.discard(entry.id)
        return replace(sealed, columns=columns, experts=experts)

    async def delete(self, entry: Entry) -> None:
        if self._entries.get(entry.id) is not entry:
            raise not_found(entry.id)
        self._forget(entry)
        self.counts.deleted += 1
        await self._close(entry)

    async def watch(self) -> None:
        """Until cancelled, expires what is idle or too old; in order of use and age, so that only that is looked at."""
        while True:
            await asyncio.sleep(CHECK_S)
            now = time.monotonic()
            for entry in self._overdue(now):
                self._expire(entry, "idle" if entry.deadline > now else "lifetime")
            while self._expired and (next(iter(self._expired.values())) <= now or len(self._expired) > EXPIRED_MOST):
                self._expired.popitem(last=False)

    async def finish(self) -> None:
        """Waits for what is being closed. Open sessions stay on disk, for the next process."""
        while self._closing:
            await asyncio.wait(self._closing)

    def _overdue(self, now: float) -> list[Entry]:
        overdue: list[Entry] = []
        for id in self._by_use:
            entry = self._entries[id]
            if now - entry.used_at < self._settings.idle_s:
                break
            if entry.session is None or not entry.session.busy:
                overdue.append(entry)
        for entry in self._entries.values():
            if entry.deadline > now:
                break
            overdue.append(entry)
        return list(dict.fromkeys(overdue))

    def _expire(self, entry: Entry, reason: str) -> None:
        logger.info("action=session_expired session=%s reason=%s", entry.id, reason)
        self._forget(entry)
        self.counts.expired += 1
        self._expired[entry.id] = time.monotonic() + EXPIRED_S
        self._in_background(self._close(entry))

    def _forget(self, entry: Entry) -> None:
        self._entries.pop(entry.id, None)
        self._by_use.pop(entry.id, None)
        self.retained_bytes -= entry.retained_bytes
        entry.retained_bytes = 0

    def _drop_session(self, entry: Entry) -> None:
        entry.session = None
        self.retained_bytes -= entry.retained_bytes
        entry.retained_bytes = 0

    async def _close(self, entry: Entry) -> None:
        """Sealed blobs stay: they are whoever's asked for them. Once this is over, none appears any more."""
        if entry.sealing:
            await asyncio.wait([entry.sealing])
        session = entry.session
        try:
            if session is not None:
                await session.close()
            if entry.sealed is None and not (session and session.sealed):
                await in_io_thread(self._shelf.discard, entry.id)
        except (BlobError, OSError) as error:
            logger.warning("action=not_discarded session=%s error=%r", entry.id, error)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _open(self, entry: Entry) -> None:
        if entry.opening is None:
            entry.opening = asyncio.create_task(self._recover(entry))
        await asyncio.shield(entry.opening)
        if entry.session is None:
            raise self._gone(entry.id)

    async def _recover(self, entry: Entry) -> None:
        key, route_format = self._shelf.session_key(entry.id), self._config.engine.route_format
        try:
            session = await Session.recover(self._shelf.store, key, route_format=route_format)
            entry.notes = msgspec.json.decode(session.settings.notes, type=Notes)
        except (BlobError, OSError, msgspec.DecodeError) as error:
            logger.error("action=session_lost session=%s error=%s", entry.id, error)
            if self._entries.get(entry.id) is entry:
                self._expire(entry, "unreadable")
            return
        entry.session = session
        entry.deadline = time.monotonic() + self._settings.lifetime_s - (time.time() - entry.notes.created_at)
        self.counts.recovered += 1
        logger.info("action=session_recovered session=%s turns=%d", entry.id, session.turns)

    def _gone(self, id: str) -> NotFound | Expired:
        if id in self._expired:
            return Expired(f"session expired: session_id={id}")
        return not_found(id)

    def _session_settings(self, id: str, asked: NewSession, notes: Notes) -> SessionSettings:
        policy = self._config.policy
        return SessionSettings(
            session=id,
            key=self._shelf.session_key(id),
            rollout=asked.rollout or id,
            attempt=asked.attempt,
            mode=Mode(self._config.session_mode),
            append_roles=self._settings.append_roles,
            max_seq_len=policy.max_seq_len,
            max_samples=policy.max_samples,
            logprobs_mode=self._config.engine.logprobs_mode,
            notes=msgspec.json.encode(notes).decode(),
        )


def _files_key(asked: NewSession) -> str | None:
    if asked.execution is None:
        return None
    assert asked.run is not None, "checked when it was read"
    assert asked.rollout is not None
    return ids.execution_directory(asked.run, asked.rollout, asked.attempt, asked.execution)


def opened(entry: Entry) -> Session:
    """NotFound where it was sealed: nothing is recorded any more."""
    if entry.session is None:
        raise not_found(entry.id)
    return entry.session


def not_found(id: str) -> NotFound:
    return NotFound(f"session not found: session_id={id}")

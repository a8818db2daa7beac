"""A session in the server's memory, and its files beside the recording."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headpond.engines.replicas.selection import Replica
from headpond.playing.posted_scores import NOTHING_POSTED, PostedScore
from headpond.recording import Session
from headpond.replica_use import Usage
from headpond.servers.sessions.retries import SentChats


class InFlight:
    def __init__(self) -> None:
        self._scopes: set[asyncio.Timeout] = set()
        self._ended: asyncio.Event | None = None  # made when it is awaited: it takes a kilobyte

    @contextlib.asynccontextmanager
    async def request(self, gone: Callable[[], Exception]) -> AsyncIterator[None]:
        """Raises `gone()` if the session ends first: what the block awaits is then cancelled, the engine's request
        included. A turn that is being recorded is recorded completely."""
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.add(scope)
                yield
        except TimeoutError:
            if scope.expired():
                raise gone() from None
            raise
        finally:
            self._scopes.discard(scope)
            if self._ended:
                self._ended.set()

    async def end(self) -> None:
        """Returns when none is left. Nothing is awaited after that, so that the caller can keep it so."""
        while self._scopes:
            self._ended = self._ended or asyncio.Event()
            self._ended.clear()
            for scope in self._scopes:
                if not scope.expired():
                    scope.reschedule(asyncio.get_running_loop().time())
            await self._ended.wait()


class SessionMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The server's own data about a session, stored by the recorder in `SessionSettings.notes`."""

    secret_digest: str  # digest of the secret for chats
    control_digest: str  # digest of the secret for rewards, sealing and deleting
    sampling: dict[str, Any]
    created_at: float  # seconds since 1970
    # directory of the store that files are sealed into; default: the session's own
    files_key: str | None = None
    forced: dict[str, Any] = {}  # fields of every chat, whatever the client sends

    @property
    def digests(self) -> tuple[str, str]:
        """Return the digests of both secrets."""
        return self.secret_digest, self.control_digest


class SealedSession(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed session on disk, for a seal request that is repeated after a restart."""

    metadata: SessionMetadata
    answer: msgspec.Raw


@dataclass(kw_only=True, eq=False)
class Entry:
    id: str
    session: Session | None = None  # None: not yet recovered after a restart, or sealed
    metadata: SessionMetadata | None = None
    sealed: bytes | None = None  # response of the seal request
    score: PostedScore = NOTHING_POSTED
    scoring: asyncio.Lock = field(default_factory=asyncio.Lock)
    used_at: float = field(default_factory=time.monotonic)
    deadline: float = 0.0  # time of the monotonic clock at which it expires
    last_replica: Replica | None = None  # replica that served the last chat
    # use of the replicas, since this process has the session
    usage: Usage = field(default_factory=Usage)
    aborts: int = 0  # completions that the engine aborted, and the client asked for again
    in_flight: InFlight = field(default_factory=InFlight)
    sent_chats: SentChats = field(default_factory=SentChats)
    opening: asyncio.Task[None] | None = None
    sealing: asyncio.Task[None] | None = None

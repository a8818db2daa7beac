"""The stream of the workers' replies: read from the position in the ledger, trimmed behind it."""

import logging
from typing import Any

from pydantic import ValidationError

from headpond.broker import redis_keys
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.tasks.stage import Reply

logger = logging.getLogger("headpond.replies")

BLOCK_MS = 1000
AT_ONCE = 100  # for one commit
START = "0-0"
MOST_CHARACTERS = 200  # of a text from a forged reply

Entry = tuple[bytes, dict[bytes, bytes]]  # (id, fields)


class ReplyStream:
    def __init__(self, run: str, broker: Broker, ledger: Ledger) -> None:
        self._run = run
        self._stream = redis_keys.replies(run)
        self._broker = broker
        self._ledger = ledger
        self._outages_seen = -1
        # the stream was reset after the last entries were read: their ids are of the old
        # one
        self._restarted = False

    @property
    def position(self) -> str:
        return self._ledger.state.position

    async def read(self) -> list[Entry]:
        """The next entries, or none after a second. The caller accepts and applies each, commits, then calls `trim`."""
        if self._outages_seen != self._broker.outages:
            self._outages_seen = self._broker.outages
            await self.newest()
        self._restarted = False
        streams_read: Any = await self._broker.call(
            lambda client: client.xread({self._stream: self.position}, count=AT_ONCE, block=BLOCK_MS)
        )
        return _entries(streams_read)

    def accept(self, entry: Entry) -> Reply | None:
        """The entry's reply, if it is of this run. The position advances in the transaction that applies it."""
        id, fields = entry
        if not self._restarted:
            self._ledger.state.position = id.decode()
        return self._parse(id, fields)

    async def newest(self) -> str:
        """The id of the newest reply that was ever in the stream.

        A stream that is missing or ends before `position` is a new one (Redis was flushed): read from its start.
        """
        position = self.position  # before the command: replies may be read until its result arrives
        newest = await self._broker.call(self._last_id)
        if _order(newest) < _order(position):
            logger.warning("action=replies_from_start stream=%s position=%s", self._stream, position)
            self._ledger.state.position = START
            self._restarted = True
        return newest

    async def _last_id(self, client: Any) -> str:
        if not await client.exists(self._stream):
            return START
        return (await client.xinfo_stream(self._stream))["last-generated-id"].decode()

    def behind(self, id: str) -> bool:
        return _order(self.position) < _order(id)

    async def trim(self) -> None:
        await self._broker.call(lambda client: client.xtrim(self._stream, minid=self.position, approximate=True))

    async def delete(self) -> None:
        await self._broker.call(lambda client: client.delete(self._stream))
        self._ledger.state.position = START

    def _parse(self, id: bytes, fields: dict[bytes, bytes]) -> Reply | None:
        """Replies are not authenticated: every process that reaches Redis can add one. None may name files that its
        own execution did not write: they would be delivered or deleted."""
        try:
            reply = Reply.model_validate_json(fields.get(b"reply", b""))
        except ValidationError as error:
            logger.error("action=reply_unreadable id=%s errors=%d", id.decode(), error.error_count())
            self._ledger.event(id.decode(), "reply_unreadable", f"{error.error_count()} errors")
            return None
        if reply.run != self._run:
            return None
        if not reply.names_own_files:
            logger.error("action=reply_refused id=%s job=%s: it names files of another job", id.decode(), reply.job)
            self._ledger.event(id.decode(), "reply_refused", f"job {reply.job} by {reply.worker}"[:MOST_CHARACTERS])
            self._ledger.state.replies_refused += 1
            return None
        return reply


def _entries(streams_read: Any) -> list[Entry]:
    """XREAD returns a list of streams in RESP2 and a mapping in RESP3."""
    if not streams_read:
        return []
    entries = next(iter(streams_read.values())) if isinstance(streams_read, dict) else streams_read[0][1]
    return entries[0] if entries and isinstance(entries[0], list) else entries


def _order(id: str) -> tuple[int, int]:
    milliseconds, _, number = id.partition("-")
    return int(milliseconds), int(number)

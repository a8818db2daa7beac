"""The run's stream of replies: read from a position that the ledger keeps, trimmed behind it."""

import logging
from typing import Any

from pydantic import ValidationError

from orchestrator.broker import Broker
from orchestrator.ledger.ledger import Ledger
from penstock import redis_keys
from penstock.messages import Reply

logger = logging.getLogger("penstock.replies")

BLOCK_MS = 1000
AT_ONCE = 100  # for one commit
START = "0-0"

Entry = tuple[bytes, dict[bytes, bytes]]
"""an id and its fields"""


class ReplyStream:
    def __init__(self, run: str, broker: Broker, ledger: Ledger) -> None:
        self._run = run
        self._stream = redis_keys.replies(run)
        self._broker = broker
        self._ledger = ledger
        self._outages_seen = -1
        self._begun_anew = False
        """since the last entries were read: their ids are another stream's"""

    @property
    def position(self) -> str:
        return str(self._ledger.meta.get("position", START))

    async def read(self) -> list[Entry]:
        """The next entries, or none after a second. The caller takes and applies each; once that is committed, `trim`
        may follow."""
        if self._outages_seen != self._broker.outages:
            self._outages_seen = self._broker.outages
            await self.newest()
        self._begun_anew = False
        answer: Any = await self._broker.ask(
            lambda client: client.xread({self._stream: self.position}, count=AT_ONCE, block=BLOCK_MS)
        )
        return _entries(answer)

    def take(self, entry: Entry) -> Reply | None:
        """The reply in it, if it is one of this run's. The position moves on with what the caller makes of it."""
        id, fields = entry
        if not self._begun_anew:
            self._ledger.set("position", id.decode())
        return self._parse(id, fields)

    async def newest(self) -> str:
        """The id of the newest reply that was ever in the stream.

        A stream that is gone, or has not reached our position, is another stream: it is read from its start.
        """
        position = self.position  # as it is before the question: replies may be read until the answer comes
        newest = await self._broker.ask(self._last_id)
        if _order(newest) < _order(position):
            logger.warning("action=replies_from_start stream=%s position=%s", self._stream, position)
            self._ledger.set("position", START)
            self._begun_anew = True
        return newest

    async def _last_id(self, client: Any) -> str:
        if not await client.exists(self._stream):
            return START
        return (await client.xinfo_stream(self._stream))["last-generated-id"].decode()

    def behind(self, id: str) -> bool:
        return _order(self.position) < _order(id)

    async def trim(self) -> None:
        await self._broker.ask(lambda client: client.xtrim(self._stream, minid=self.position, approximate=True))

    async def delete(self) -> None:
        await self._broker.ask(lambda client: client.delete(self._stream))
        self._ledger.set("position", START)

    def _parse(self, id: bytes, fields: dict[bytes, bytes]) -> Reply | None:
        try:
            reply = Reply.model_validate_json(fields.get(b"reply", b""))
        except ValidationError as error:
            logger.error("action=reply_unreadable id=%s errors=%d", id.decode(), error.error_count())
            self._ledger.event(id.decode(), "reply_unreadable", f"{error.error_count()} errors")
            return None
        return reply if reply.run == self._run else None


def _entries(answer: Any) -> list[Entry]:
    """XREAD's answer is a list of streams in RESP2 and a mapping in RESP3."""
    if not answer:
        return []
    streams = list(answer.values()) if isinstance(answer, dict) else [entries for _, entries in answer]
    entries = streams[0]
    return entries[0] if entries and isinstance(entries[0], list) else entries


def _order(id: str) -> tuple[int, int]:
    milliseconds, _, number = id.partition("-")
    return int(milliseconds), int(number)

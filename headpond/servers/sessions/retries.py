"""Requests that are sent again: which chat in flight one joins, and which recorded answer it gets.

Equal bodies alone are several samples of one prompt. A request is sent again if it has the idempotency key of the
first, if its client counts it as a retry, or if the first one's client has left.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import xxhash
from aiohttp import web

from headpond.recording import Session

IDEMPOTENCY_KEY = "Idempotency-Key"
KEY_CHARACTERS = 256
# OpenAI's clients send it, 0 with the first attempt.
RETRY_COUNT = "x-stainless-retry-count"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Marks of a request that is sent again."""

    key: str
    retried: bool

    @classmethod
    def of(cls, request: web.BaseRequest) -> "Attempt":
        count = request.headers.get(RETRY_COUNT, "").strip()
        retried = count.isascii() and count.isdigit() and count.strip("0") != ""
        return cls(key=request.headers.get(IDEMPOTENCY_KEY, "")[:KEY_CHARACTERS], retried=retried)


def request_id(agent: str, body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(agent.encode() + b"\0" + body)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The response to a chat."""

    turn: int | None  # None if the session ended before it was recorded
    headers: Mapping[str, str]
    body: bytes


@dataclass(kw_only=True, eq=False)
class SentChat:
    id: bytes
    key: str
    request: web.BaseRequest  # request of the client that waits for the answer
    answer: asyncio.Future[Answer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def gone(self) -> bool:
        """Whether no client waits for the answer."""
        transport = self.request.transport
        return transport is None or transport.is_closing()

    @property
    def turn(self) -> int | None:
        done = self.answer.done() and not self.answer.cancelled() and not self.answer.exception()
        return self.answer.result().turn if done else None

    def fail(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # it may be that no request joined

    async def join(self, request: web.BaseRequest) -> Answer:
        self.request = request
        return await asyncio.shield(self.answer)


class SentChats:
    """The chats of one session until their answers are written."""

    def __init__(self) -> None:
        self._chats: list[SentChat] = []

    def add(self, chat: SentChat) -> None:
        self._chats = [each for each in self._chats if not (each.answer.done() and each.gone)]
        self._chats.append(chat)

    def remove(self, chat: SentChat) -> None:
        if chat in self._chats:
            self._chats.remove(chat)

    def may_join(self, attempt: Attempt) -> bool:
        """Whether the body decides if a request is one of those in flight."""
        keys = {chat.key for chat in self._chats}
        return attempt.retried or bool(attempt.key and attempt.key in keys) or any(chat.gone for chat in self._chats)

    def find(self, session: Session, id: bytes, attempt: Attempt) -> SentChat | int | None:
        """The chat in flight or the recorded turn whose answer this request is for; None if it is a new one."""
        same = [chat for chat in self._chats if chat.id == id and not chat.answer.done()]
        if attempt.key:
            joined = [chat for chat in same if chat.key == attempt.key]
            return joined[-1] if joined else session.recorded_turn(id, attempt.key)
        if left := [chat for chat in same if chat.gone]:
            return left[-1]
        turn, written = session.recorded_turn(id, ""), {chat.turn for chat in self._chats if not chat.gone}
        if turn is not None and session.is_unseen(turn) and turn not in written:
            return turn
        if attempt.retried and not session.has_lost(id):
            return same[-1] if same else turn
        return None

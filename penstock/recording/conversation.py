"""The messages of a session, known by their digests alone: what a request goes on from, and what it may discard.

Owns no text and no tokens. Every answered turn is a checkpoint; a request names the checkpoint it extends by repeating
its messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

import orjson
import xxhash

from penstock.errors import BadRequest
from penstock.turn import Message

# What makes two messages the same; an absent field, null, "" and [] are equal.
COMPARED = ("role", "content", "reasoning_content", "tool_calls")


class Mode(StrEnum):
    LINEAR = "linear"
    """One conversation: a request extends it, or goes back over at most one answer."""
    OPEN = "open"
    """Whatever is asked: sub-agents, compacted contexts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The messages up to a turn's answer, this included. START is the place before the first turn."""

    turn: int = -1
    parent: int = -1
    messages: int = 0
    digest: bytes = b""
    request_digest: bytes = b""
    """Without the answer."""


START = Checkpoint()


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request that was found fit to be sent: the messages of a checkpoint, and more."""

    parent: Checkpoint
    appended: Sequence[Message]


@dataclass(frozen=True, kw_only=True)
class Digested:
    """A request's messages, found to be messages, with the digest of each and all before it."""

    messages: Sequence[Message]
    chain: Sequence[bytes]


def digested(messages: object) -> Digested:
    """Needs no session, so that a long request can be treated in a thread. BadRequest says what is wrong with it."""
    checked = _checked(messages)
    try:
        return Digested(messages=checked, chain=_chain(b"", checked))
    except TypeError as error:
        raise BadRequest(f"messages hold what JSON cannot: {error}") from error


class Conversation:
    def __init__(self, *, mode: Mode, append_roles: frozenset[str]) -> None:
        self._mode = mode
        self._append_roles = append_roles
        self._checkpoints: list[Checkpoint] = []
        self._by_digest: dict[bytes, Checkpoint] = {}

    @property
    def turns(self) -> int:
        return len(self._checkpoints)

    def line(self, turn: int | None = None) -> list[int]:
        """The turns that led to `turn` (by default the last), oldest first."""
        checkpoint, line = self._checkpoint(self.turns - 1 if turn is None else turn), list[int]()
        while checkpoint is not START:
            line.append(checkpoint.turn)
            checkpoint = self._checkpoint(checkpoint.parent)
        return line[::-1]

    def prepare(self, messages: object) -> Request:
        """Changes nothing. BadRequest when the messages are none, or diverge where that is not allowed."""
        asked = messages if isinstance(messages, Digested) else digested(messages)
        if self._mode is Mode.OPEN:
            parent = self._longest_known(asked.chain)
        else:
            parent = self._linear_parent(asked.chain)
            self._check_appended(asked.messages, parent)
        return Request(parent=parent, appended=asked.messages[parent.messages :])

    def request(self, parent: int, appended: Sequence[Message]) -> Request:
        """A request that was prepared before, by this process or by another."""
        return Request(parent=self._checkpoint(parent), appended=appended)

    def answered(self, request: Request, answer: Message) -> Checkpoint:
        """What `commit` will add. Changes nothing."""
        chain = _chain(request.parent.digest, [*request.appended, answer])
        return Checkpoint(
            turn=self.turns,
            parent=request.parent.turn,
            messages=request.parent.messages + len(chain),
            digest=chain[-1],
            request_digest=chain[-2] if request.appended else request.parent.digest,
        )

    def commit(self, checkpoint: Checkpoint) -> None:
        self._checkpoints.append(checkpoint)
        self._by_digest[checkpoint.digest] = checkpoint

    def _checkpoint(self, turn: int) -> Checkpoint:
        return START if turn == START.turn else self._checkpoints[turn]

    def _linear_parent(self, chain: Sequence[bytes]) -> Checkpoint:
        if not self._checkpoints:
            return START
        first, last = self._checkpoints[0], self._checkpoints[-1]
        if _repeats(chain, last.messages, last.digest):
            return last
        before = self._checkpoint(last.parent)
        if before is START and _repeats(chain, first.messages - 1, first.request_digest):
            return START
        if before is not START and _repeats(chain, before.messages, before.digest):
            return before
        raise BadRequest(
            f"the request's messages diverge from the recorded conversation of {last.messages} before its last two "
            "answers: at most one generated message may be discarded; start another session, or use mode open"
        )

    def _longest_known(self, chain: Sequence[bytes]) -> Checkpoint:
        return next((self._by_digest[digest] for digest in reversed(chain) if digest in self._by_digest), START)

    def _check_appended(self, messages: Sequence[Message], parent: Checkpoint) -> None:
        if not self._checkpoints:
            return
        shared = self._checkpoints[0].messages - 1 if parent is START else parent.messages
        for index, message in enumerate(messages[shared:], shared):
            if message["role"] not in self._append_roles:
                allowed = ", ".join(sorted(self._append_roles))
                raise BadRequest(f"messages[{index}] has role {message['role']!r}: only {allowed} may be appended")
        if parent is not START and len(messages) == parent.messages:
            raise BadRequest("the request appends nothing to the recorded conversation: there is nothing to answer")


def _repeats(chain: Sequence[bytes], messages: int, digest: bytes) -> bool:
    return len(chain) >= messages > 0 and chain[messages - 1] == digest


def _chain(start: bytes, messages: Sequence[Message]) -> list[bytes]:
    """Digest of the messages before and the first, before and the first two, ..."""
    chain: list[bytes] = []
    for message in messages:
        compared = {name: message[name] for name in COMPARED if message.get(name)}
        start = xxhash.xxh3_128_digest(start + orjson.dumps(compared, option=orjson.OPT_SORT_KEYS))
        chain.append(start)
    return chain


def _checked(messages: object) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message")
    for index, message in enumerate(cast("list[object]", messages)):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{index}] must be an object with a role")
        content = message.get("content")
        parts = cast("list[object]", content) if isinstance(content, list) else []
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in parts):
            raise BadRequest(f"messages[{index}] has content that is not text: images and the like are not supported")
    return cast("list[Message]", messages)

"""The messages of a session as digests: which recorded turn a request continues, and what it may discard.

Keeps neither text nor tokens. Every recorded turn is a checkpoint; a request selects the one that it continues by
repeating its messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

import orjson
import xxhash

from penstock.errors import BadRequest
from penstock.turn import Message

# Fields by which messages are compared. An absent field, null, "" and [] are equal.
COMPARED = ("role", "content", "reasoning_content", "tool_calls")


class Mode(StrEnum):
    LINEAR = "linear"
    """One conversation: a request extends it, or discards at most its last answer."""
    OPEN = "open"
    """Any request is allowed: sub-agents, compacted contexts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The messages up to and including a turn's answer. START is the checkpoint before the first turn."""

    turn: int = -1
    parent: int = -1
    messages: int = 0
    digest: bytes = b""
    request_digest: bytes = b""
    """Digest without the answer."""


START = Checkpoint()


@dataclass(frozen=True, kw_only=True)
class ConversationRequest:
    """A valid request: the messages of a checkpoint, followed by new ones."""

    parent: Checkpoint
    appended: Sequence[Message]


@dataclass(frozen=True, kw_only=True)
class DigestedMessages:
    """The messages of a request, validated."""

    messages: Sequence[Message]
    chain: Sequence[bytes]
    """For each message, the digest of it and all before it."""


def digest_messages(messages: object) -> DigestedMessages:
    """Validate and digest the messages of a request; BadRequest if they are not chat messages. Needs no session, so a
    long request can be digested in a thread."""
    checked = _checked(messages)
    try:
        return DigestedMessages(messages=checked, chain=_chain(b"", checked))
    except TypeError as error:
        raise BadRequest(f"messages are not JSON-serializable: {error}") from error


class Conversation:
    def __init__(self, *, mode: Mode, append_roles: frozenset[str]) -> None:
        self._mode = mode
        self._append_roles = append_roles
        self._checkpoints: list[Checkpoint] = []
        self._by_digest: dict[bytes, Checkpoint] = {}

    @property
    def turns(self) -> int:
        return len(self._checkpoints)

    def path_to(self, turn: int | None = None) -> list[int]:
        """`turn` (by default the last) and the turns that it continues, oldest first."""
        checkpoint, path = self._checkpoint(self.turns - 1 if turn is None else turn), list[int]()
        while checkpoint is not START:
            path.append(checkpoint.turn)
            checkpoint = self._checkpoint(checkpoint.parent)
        return path[::-1]

    def prepare(self, messages: object) -> ConversationRequest:
        """Validate a request against the conversation: BadRequest if the messages are malformed, or diverge in linear
        mode. No side effects."""
        digested = messages if isinstance(messages, DigestedMessages) else digest_messages(messages)
        if self._mode is Mode.OPEN:
            parent = self._longest_recorded(digested.chain)
        else:
            parent = self._linear_parent(digested.chain)
            self._check_appended(digested.messages, parent)
        return ConversationRequest(parent=parent, appended=digested.messages[parent.messages :])

    def request(self, parent: int, appended: Sequence[Message]) -> ConversationRequest:
        """A request that was prepared earlier, by this process or another."""
        return ConversationRequest(parent=self._checkpoint(parent), appended=appended)

    def checkpoint_after(self, request: ConversationRequest, answer: Message) -> Checkpoint:
        """The checkpoint of `request` with its answer, to be added by `commit`. No side effects."""
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

    def _longest_recorded(self, chain: Sequence[bytes]) -> Checkpoint:
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
            raise BadRequest("the request appends nothing to the recorded conversation: there is nothing to complete")


def _repeats(chain: Sequence[bytes], messages: int, digest: bytes) -> bool:
    return len(chain) >= messages > 0 and chain[messages - 1] == digest


def _chain(start: bytes, messages: Sequence[Message]) -> list[bytes]:
    """For each message, the digest of everything before it (`start`) and the messages up to it."""
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
            raise BadRequest(f"messages[{index}] has content that is not text: only text parts are supported")
    return cast("list[Message]", messages)

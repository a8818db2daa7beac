"""The messages of a session as digests: which recorded turn a request continues, and which it may
discard.

A conversation keeps neither text nor tokens. Every recorded turn is a checkpoint; a request selects
one by repeating its messages. Answers behind the same messages and with the same meaning share a
digest (`echoes.py`). `Prepared` is a request that is ready to be sent.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

import xxhash

from headpond.errors import BadRequest
from headpond.recording.echoes import Echo, calls_alone, exact_form, is_text, meaning
from headpond.turn import Ids, Message, OpenSample, RouteFormat

NO_ARRIVAL = -1  # Arrival number of a request that is not recorded.
ANSWER = b"answer"  # Separates digests of recorded answers from those of other messages.
# Recognised echoes that are kept by their exact form: about 200 KB. A forgotten one is compared
# again.
MAX_ALIASES = 1024


class Mode(StrEnum):
    # One conversation per agent: a request extends it, or discards at most its last answer.
    LINEAR = "linear"
    OPEN = "open"  # Any request is allowed: sub-agents, compacted contexts.


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The messages up to and including a turn's answer. START is the checkpoint before the first turn."""

    turn: int = -1
    parent: int = -1
    messages: int = 0
    digest: bytes = b""
    request_digest: bytes = b""  # Digest without the answer.
    answer: bytes = b""  # Exact form of the answer.
    echo: bytes = b""  # Exact form of the parent's answer as the request repeated it.
    # Digest with the answer's calls alone: an echo may lack the text. Empty if there are no
    # calls, or no text.
    calls: bytes = b""
    twin: int = -1  # The last turn with the same digest that was committed before this one.
    arrival: int = -1
    agent: str = ""


START = Checkpoint()


@dataclass(frozen=True, kw_only=True)
class ConversationRequest:
    """A valid request: the messages of a checkpoint, followed by new ones."""

    parent: Checkpoint
    appended: Sequence[Message]
    forms: Sequence[bytes]  # Exact forms of `appended`.
    echo: bytes = b""  # Exact form of the parent's answer as the request repeats it.
    # Positions of messages that are recorded answers in another form, and their turns.
    repairs: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, kw_only=True)
class DigestedMessages:
    """The messages of a request, validated."""

    messages: Sequence[Message]
    forms: Sequence[bytes]  # The exact form of each message.


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The inputs for sending a request and for reading its response."""

    request: ConversationRequest
    arrival: int  # Number of the request in the session, from 0 on.
    history_ids: Ids  # Tokens of the conversation before `request.appended`.
    answer_from: int  # Position of the last answer in `history_ids`.
    # First routed row to request, provided that the prompt begins with `history_ids`.
    routes_from: int
    open_turns: Mapping[int, OpenSample]  # Turns that the response may extend.
    route_format: RouteFormat  # An argument of `read_turn`.

    @property
    def open_samples(self) -> list[OpenSample]:
        """The open samples, as `read_turn` takes them."""
        return list(self.open_turns.values())


def digest_messages(messages: object, echo: Echo = Echo.RECOGNISED) -> DigestedMessages:
    """Validate and digest the messages of a request; BadRequest if they are not chat messages. Needs no session, so a
    long request can be digested in a thread."""
    checked = _checked(messages)
    try:
        return DigestedMessages(messages=checked, forms=[exact_form(message, echo) for message in checked])
    except TypeError as error:
        raise BadRequest(f"messages are not JSON-serializable: {error}") from error


class Conversation:
    def __init__(self, *, mode: Mode, append_roles: frozenset[str], echo: Echo = Echo.RECOGNISED) -> None:
        self.echo = echo
        self._mode = mode
        self._append_roles = append_roles
        self._checkpoints: list[Checkpoint] = []
        # Digest -> its turn committed last. `Checkpoint.twin` leads to the others.
        self._last_at: dict[bytes, int] = {}
        self._answered: set[bytes] = set()  # Digests of requests that have an answer.
        # Digest of a request and the exact form of an echo behind it -> digest of the
        # answer.
        self._aliases: dict[bytes, bytes] = {}
        # `Checkpoint.calls` -> digest of the answer that was committed last.
        self._calls: dict[bytes, bytes] = {}
        # The first and the last turn of each agent, by arrival.
        self._agents: dict[str, tuple[int, int]] = {}

    @property
    def turns(self) -> int:
        return len(self._checkpoints)

    def path_to(self, turn: int) -> list[int]:
        """`turn` and the turns that it continues, oldest first."""
        checkpoint, path = self._checkpoint(turn), list[int]()
        while checkpoint is not START:
            path.append(checkpoint.turn)
            checkpoint = self._parent(checkpoint)
        return path[::-1]

    def parents(self) -> list[int]:
        """The turn that each turn continues; -1 for none. The order of commits does not change it."""
        return [self._parent(checkpoint).turn for checkpoint in self._checkpoints]

    def current(self) -> list[int]:
        """The turns that no agent has discarded, in the order of arrival."""
        turns = {turn for _, last in self._agents.values() for turn in self.path_to(last)}
        return sorted(turns, key=lambda turn: self._checkpoints[turn].arrival)

    def distinct(self, turns: Iterable[int]) -> int:
        """How many answers with different meanings these turns have."""
        return len({self._checkpoints[turn].digest for turn in turns})

    def prepare(self, messages: object, *, agent: str = "") -> ConversationRequest:
        """Validate a request against the conversation. BadRequest if the messages are malformed, or
        diverge in linear mode.

        Only the memory of recognised echoes changes.
        """
        digested = messages if isinstance(messages, DigestedMessages) else digest_messages(messages, self.echo)
        chain = self._chain(digested)
        if self._mode is Mode.OPEN:
            parent = self._deepest(chain, digested)
        else:
            parent = self._linear_parent(chain, digested, agent)
            self._check_appended(digested.messages, parent, agent)
        return ConversationRequest(
            parent=parent,
            appended=digested.messages[parent.messages :],
            forms=digested.forms[parent.messages :],
            echo=digested.forms[parent.messages - 1] if parent is not START else b"",
            repairs=self._repairs(parent, digested),
        )

    def request(self, parent: int, appended: Sequence[Message], *, echo: bytes = b"") -> ConversationRequest:
        """A request that was prepared earlier, by this process or another."""
        checkpoint, forms = self._checkpoint(parent), [exact_form(message, self.echo) for message in appended]
        return ConversationRequest(parent=checkpoint, appended=appended, forms=forms, echo=echo or checkpoint.answer)

    def checkpoint_after(
        self, request: ConversationRequest, answer: Message, *, arrival: int | None = None, agent: str = ""
    ) -> Checkpoint:
        """The checkpoint of `request` with its answer. `commit` adds it later. No side effects."""
        arrival = self.turns if arrival is None else arrival
        parent = self._twin(request.parent, arrival, request.echo)
        request_digest = parent.digest
        for appended_form in request.forms:
            request_digest = _digest(request_digest, appended_form)
        form = exact_form(answer, self.echo)
        digest = _digest(request_digest, form if self.echo is Echo.EXACT else ANSWER + meaning(answer))
        calls = calls_alone(answer)
        return Checkpoint(
            turn=self.turns,
            parent=parent.turn,
            messages=parent.messages + len(request.appended) + 1,
            digest=digest,
            request_digest=request_digest,
            answer=form,
            echo=parent.answer if request.echo == parent.answer else request.echo,
            calls=_digest(request_digest, ANSWER + calls) if calls else b"",
            twin=self._last_at.get(digest, -1),
            arrival=arrival,
            agent=agent,
        )

    def commit(self, checkpoint: Checkpoint) -> None:
        self._checkpoints.append(checkpoint)
        self._last_at[checkpoint.digest] = checkpoint.turn
        self._answered.add(checkpoint.request_digest)
        if self.echo is Echo.RECOGNISED:
            self._remember(_digest(checkpoint.request_digest, checkpoint.answer), checkpoint.digest)
            if checkpoint.calls:
                self._calls[checkpoint.calls] = checkpoint.digest
        first, last = self._agents.get(checkpoint.agent, (checkpoint.turn, checkpoint.turn))
        order = sorted((first, last, checkpoint.turn), key=lambda turn: self._checkpoints[turn].arrival)
        self._agents[checkpoint.agent] = order[0], order[-1]

    def _checkpoint(self, turn: int) -> Checkpoint:
        return START if turn == START.turn else self._checkpoints[turn]

    def _parent(self, checkpoint: Checkpoint) -> Checkpoint:
        return self._twin(self._checkpoint(checkpoint.parent), checkpoint.arrival, checkpoint.echo)

    def _chain(self, digested: DigestedMessages) -> list[bytes]:
        """The digest of each message and all before it."""
        chain, digest = list[bytes](), b""
        for message, form in zip(digested.messages, digested.forms, strict=True):
            digest = self._after(digest, message, form)
            chain.append(digest)
        return chain

    def _after(self, prefix: bytes, message: Message, form: bytes) -> bytes:
        plain = _digest(prefix, form)
        if self.echo is Echo.EXACT or message["role"] != "assistant" or prefix not in self._answered:
            return plain
        if (alias := self._aliases.get(plain)) is not None:
            return alias
        answer = _digest(prefix, ANSWER + meaning(message))
        answer = answer if answer in self._last_at else self._calls.get(answer)
        if answer is None:
            return plain
        self._remember(plain, answer)
        return answer

    def _remember(self, plain: bytes, answer: bytes) -> None:
        while len(self._aliases) >= MAX_ALIASES:
            del self._aliases[next(iter(self._aliases))]
        self._aliases[plain] = answer

    def _deepest(self, chain: Sequence[bytes], digested: DigestedMessages) -> Checkpoint:
        for position in reversed(range(len(chain))):
            if (turn := self._last_at.get(chain[position])) is not None:
                return self._twin(self._checkpoints[turn], None, digested.forms[position])
        return START

    def _linear_parent(self, chain: Sequence[bytes], digested: DigestedMessages, agent: str) -> Checkpoint:
        if agent not in self._agents:
            return self._deepest(chain, digested)
        first, last = (self._checkpoints[turn] for turn in self._agents[agent])
        if len(chain) >= last.messages and (turn := self._last_at.get(chain[last.messages - 1])) is not None:
            repeated = self._checkpoints[turn]
            if repeated.request_digest == last.request_digest:  # the last answer, or another one to the same request
                return self._twin(repeated, None, digested.forms[last.messages - 1])
        previous = self._parent(last)
        if previous is START and _repeats(chain, first.messages - 1, first.request_digest):
            return START
        if previous is not START and _repeats(chain, previous.messages, previous.digest):
            return self._twin(previous, None, digested.forms[previous.messages - 1])
        raise BadRequest(
            f"the request's messages diverge from the recorded conversation of {last.messages} before its last two "
            "answers: at most one generated message may be discarded; start another session, or use mode open"
        )

    def _twins(self, checkpoint: Checkpoint) -> Iterator[Checkpoint]:
        """All turns with the digest of `checkpoint`."""
        turn = self._last_at[checkpoint.digest]
        while turn != START.turn:
            yield self._checkpoints[turn]
            turn = self._checkpoints[turn].twin

    def _twin(self, checkpoint: Checkpoint, arrival: int | None, echo: bytes) -> Checkpoint:
        """The turn with the digest of `checkpoint` that arrived last before `arrival`.

        Turns whose answer has the form of the echo come first.
        """
        if checkpoint is START:
            return START
        candidates = [twin for twin in self._twins(checkpoint) if arrival is None or twin.arrival < arrival]
        return max(candidates or [checkpoint], key=lambda twin: (twin.answer == echo, twin.arrival))

    def _repairs(self, parent: Checkpoint, digested: DigestedMessages) -> list[tuple[int, int]]:
        repairs: list[tuple[int, int]] = []
        while parent is not START:
            if digested.forms[parent.messages - 1] != parent.answer:
                repairs.append((parent.messages - 1, parent.turn))
            parent = self._parent(parent)
        return repairs[::-1]

    def _check_appended(self, messages: Sequence[Message], parent: Checkpoint, agent: str) -> None:
        if agent not in self._agents and parent is START:
            return
        shared = self._checkpoints[self._agents[agent][0]].messages - 1 if parent is START else parent.messages
        for index, message in enumerate(messages[shared:], shared):
            if message["role"] not in self._append_roles:
                allowed = ", ".join(sorted(self._append_roles))
                raise BadRequest(f"messages[{index}] has role {message['role']!r}: only {allowed} may be appended")
        if parent is not START and len(messages) == parent.messages:
            raise BadRequest("the request appends nothing to the recorded conversation: there is nothing to complete")


def _digest(prefix: bytes, form: bytes) -> bytes:
    return xxhash.xxh3_128_digest(prefix + form)


def _repeats(chain: Sequence[bytes], messages: int, digest: bytes) -> bool:
    return len(chain) >= messages > 0 and chain[messages - 1] == digest


def _checked(messages: object) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message")
    for index, message in enumerate(cast("list[object]", messages)):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{index}] must be an object with a role")
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise BadRequest(f"messages[{index}].content must be text or a list of text parts")
        if not isinstance(message.get("tool_calls"), list | None):
            raise BadRequest(f"messages[{index}].tool_calls must be a list")
        parts = cast("list[object]", content) if isinstance(content, list) else []
        if not all(is_text(part, message["role"]) for part in parts):
            raise BadRequest(f"messages[{index}] has content that is not text: only text parts are supported")
    return cast("list[Message]", messages)

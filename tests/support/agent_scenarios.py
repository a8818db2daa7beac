"""Random conversations of agents: tools, thoughts, echoes of every kind, retries, rollbacks and parallel branches.

A scenario is a list of requests in the order of their arrival. What is recorded must follow from it alone.
"""

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson
from hypothesis import strategies as st
from msgspec import structs

from headpond.recording import Prepared, Session
from headpond.recording.arrivals import Claim
from headpond.records.rollout import Recorded
from headpond.store.columns import read_columns
from headpond.store.experts import Experts
from headpond.store.files import FileStore
from headpond.turn import RouteFormat, Routes, TurnMetadata
from support.conversations import started, turn_of_ids
from support.plain_samples import PlainSample, PlainTurn

Message = dict[str, Any]
ROLES = {"user": 301, "assistant": 302, "tool": 303}
LAYERS, TOPK = 1, 2


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One request of an agent."""

    continues: int | None
    """The request whose answer it extends."""
    appended: Message
    answer: Message
    echo: int = 0
    """How it changes the answers that it returns."""
    edited: bool = False
    """Whether it edits the last of them, which is then a new message."""
    agent: str = ""
    fails: bool = False
    """Whether its first attempt fails."""
    seen: bool = True
    truth: list[Message] = field(default_factory=list[Message])
    """The conversation that the model sees."""
    messages: list[Message] = field(default_factory=list[Message])
    """The conversation as the agent sends it."""


def _dropped(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def _reserialised(message: Message) -> Message:
    calls = [
        {"id": f"x{number}", "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for number, call in enumerate(message.get("tool_calls", []))
    ]
    return {**message, **({"tool_calls": calls} if calls else {})}


def _in_parts(message: Message) -> Message:
    text = {"type": "text", "text": f" {message['content']}\n"}
    return {**_dropped(message), "content": [{"type": "thinking", "thinking": "?"}, text]}


ECHOES = (
    lambda message: message,
    _dropped,
    lambda message: {**_dropped(message), "reasoning": message.get("reasoning_content")},
    _reserialised,
    _in_parts,
)


@st.composite
def scenarios(draw: st.DrawFn) -> list[Sent]:
    requests: list[Sent] = []
    for number in range(draw(st.integers(1, 7))):
        continues = draw(st.none() | st.sampled_from(range(number))) if number else None
        like = draw(st.sampled_from(range(number))) if number and not draw(st.integers(0, 3)) else None
        sent = Sent(
            continues=continues,
            appended=draw(st.sampled_from([{"role": "user", "content": text} for text in ("go", "on")])),
            answer=draw(_answers(number)),
            echo=draw(st.sampled_from(range(len(ECHOES)))),
            edited=continues is not None and not draw(st.integers(0, 5)),
            agent=draw(st.sampled_from(["", "", "sub"])),
            fails=not draw(st.integers(0, 3)),
            seen=bool(draw(st.integers(0, 2))),
        )
        if like is not None:  # one prompt sampled again, perhaps with the same answer
            twin = requests[like]
            again = {"continues": twin.continues, "appended": twin.appended, "edited": twin.edited, "echo": twin.echo}
            sent = replace(sent, **again, **({"answer": twin.answer} if draw(st.booleans()) else {}))
        requests.append(_with_messages(sent, requests))
    return requests


@st.composite
def _answers(draw: st.DrawFn, number: int) -> Message:
    answer: Message = {"role": "assistant", "content": f"a{number}"}
    if draw(st.booleans()):
        answer["reasoning_content"] = f"hm{number}"
    if draw(st.booleans()):
        function = {"name": "f", "arguments": '{"x": %d.0,  "y": [1]}' % number}  # noqa: UP031 - braces of JSON
        answer["tool_calls"] = [{"id": f"call_{number}", "type": "function", "function": function}]
    return answer


def _with_messages(sent: Sent, before: list[Sent]) -> Sent:
    if sent.continues is None:
        return replace(sent, truth=[sent.appended], messages=[sent.appended])
    parent = before[sent.continues]
    edit = _edited(parent.answer)
    last = edit if sent.edited else parent.answer
    echoed = [ECHOES[sent.echo](message) if _is_answer(message) else message for message in parent.truth]
    return replace(
        sent,
        truth=[*parent.truth, last, sent.appended],
        messages=[*echoed, edit if sent.edited else ECHOES[sent.echo](last), sent.appended],
    )


def _edited(answer: Message) -> Message:
    """An agent that edits a message prints its arguments itself."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(json.loads(call["function"]["arguments"]))}}
        for call in answer.get("tool_calls", [])
    ]
    return {**answer, "content": "edited", **({"tool_calls": calls} if calls else {})}


def _is_answer(message: Message) -> bool:
    return message["role"] == "assistant" and message["content"] != "edited"


def tokens(messages: list[Message]) -> list[int]:
    """A chat template that shows everything."""
    return [token for message in messages for token in (ROLES[message["role"]], *completion_tokens(message))]


def completion_tokens(message: Message) -> list[int]:
    shown = [message.get(name) for name in ("reasoning_content", "content", "tool_calls")]
    return list(json.dumps(shown).encode())


def row(number: int, position: int) -> list[list[int]]:
    return [[1 + (number * 37 + position) % 250, 1 + position % 7]]


def plain_turns(requests: list[Sent]) -> list[PlainTurn]:
    """What the requests record, in the order of their arrival."""
    parents = [_parent(number, requests) for number in range(len(requests))]
    turns: list[PlainTurn] = []
    for number, sent in enumerate(requests):
        prompt, completion = tokens(sent.truth), completion_tokens(sent.answer)
        length = len(prompt) + len(completion) - 1
        turns.append(
            PlainTurn(
                prompt=prompt,
                completion=completion,
                logprobs=[-(number + index / 64) for index in range(len(completion))],
                rows={position: row(number, position) for position in range(length)},
                agent=sent.agent,
                seen=sent.seen or number in parents,
                parent=parents[number],
            )
        )
    return turns


def _parent(number: int, requests: list[Sent]) -> int | None:
    """The last request before with the answer that this one extends; an edited answer is a new message."""
    sent = requests[number]
    while sent.continues is not None and sent.edited:
        sent = requests[sent.continues]
    if sent.continues is None:
        return None
    found = requests[sent.continues]
    same = [
        earlier
        for earlier in range(number)
        if (requests[earlier].truth, requests[earlier].answer) == (found.truth, found.answer)
    ]
    return same[-1]


CONCURRENCY = 3
Through = Callable[[list[Message]], list[Message]]
"""What becomes of an agent's messages on their way to the session."""


class Playing:
    """The requests of a scenario, sent in their order and committed in any."""

    def __init__(self, session: Session, requests: list[Sent], choices: list[int], through: Through = list) -> None:
        self.session, self.requests = session, requests
        self.through = through
        self.choices = choices
        self.in_flight: dict[int, tuple[contextlib.ExitStack, Claim, Prepared]] = {}
        self.failed: set[int] = set()
        self.committed: set[int] = set()
        self.arrived = 0

    def choose(self, among: list[Any]) -> Any:
        return among[(self.choices.pop() if self.choices else 0) % len(among)]

    async def play(self, killed_after: int) -> Session:
        step = 0
        while len(self.committed) < len(self.requests):
            if step == killed_after:
                await self.kill()
            step += 1
            number = self.choose([*self.possible(), *self.in_flight])
            if number in self.in_flight:
                await self.end(number)
            else:
                await self.arrive(number)
        return self.session

    def possible(self) -> list[int]:
        """Requests that can be sent now: the first one that is missing, because numbers follow the order of arrival."""
        waiting = sorted(self.failed) or list(range(self.arrived, len(self.requests)))[:1]
        if len(self.in_flight) >= CONCURRENCY or not waiting:
            return []
        parent = self.requests[waiting[0]].continues
        return waiting[:1] if parent is None or parent in self.committed else []

    async def arrive(self, number: int) -> None:
        sent, place = self.requests[number], contextlib.ExitStack()
        claim = place.enter_context(self.session.claim())
        id = b"%016d" % number
        prepared = self.session.prepare(claim, self.through(sent.messages), agent=sent.agent, request_id=id)
        assert prepared.arrival == number
        self.failed.discard(number)
        self.arrived = max(self.arrived, number + 1)
        self.in_flight[number] = place, claim, prepared

    async def end(self, number: int) -> None:
        sent = self.requests[number]
        place, claim, prepared = self.in_flight.pop(number)
        with place:
            if sent.fails:
                self.requests[number] = Sent(**{**vars(sent), "fails": False})
                self.failed.add(number)
                return
            messages = await self.session.restored(prepared, self.through(sent.messages))
            prompt, completion = tokens([*messages]), completion_tokens(sent.answer)
            rows = [row(number, position) for position in range(len(prompt) + len(completion) - 1)]
            turn = turn_of_ids(
                np.array(prompt, np.int32),
                np.array(completion, np.int32),
                np.array([-(number + index / 64) for index in range(len(completion))], np.float32),
                open_samples=prepared.open_samples,
                routes=Routes(first=0, rows=np.array(rows, np.uint8), valid=None, format=RouteFormat()),
            )
            turn = structs.replace(turn, message=orjson.dumps(sent.answer))
            assert await self.session.commit(claim, prepared, turn, TurnMetadata(agent=sent.agent), seen=False)
            assert claim.turn is not None
            if sent.seen:
                self.session.see(claim.turn)
                await self.session.save_seen()
        self.committed.add(number)

    async def kill(self) -> None:
        self.failed |= set(self.in_flight)
        self.in_flight.clear()
        store, key = self.session._spool._store, self.session.settings.key  # pyright: ignore[reportPrivateUsage]
        self.session = await Session.recover(store, key)


async def recorded(
    store: FileStore, requests: list[Sent], choices: list[int], killed_after: int, through: Through = list
) -> Recorded:
    session = await started(store, concurrency=CONCURRENCY)
    return await (await Playing(session, list(requests), choices, through).play(killed_after)).seal()


def assert_sealed(store: FileStore, sealed: Recorded, expected: list[PlainSample]) -> None:
    columns = read_columns(store, sealed.columns)
    assert sealed.sample_lengths == tuple(len(sample.ids) for sample in expected)
    assert columns.input_ids.tobytes() == b"".join(np.array(sample.ids, np.int32).tobytes() for sample in expected)
    assert columns.loss_mask.tobytes() == b"".join(bytes(sample.mask) for sample in expected)
    logprobs = b"".join(np.array(sample.logprobs, np.float32).tobytes() for sample in expected)
    assert columns.logprobs.tobytes() == logprobs
    assert [columns.agent_of(number) for number in range(len(expected))] == [sample.agent for sample in expected]
    assert sealed.experts is not None
    experts = Experts(store, sealed.experts)
    for number, sample in enumerate(expected):
        out = np.empty((len(sample.ids), LAYERS, TOPK), np.int16)
        experts.read(number, 0, len(sample.ids), out)
        rows = [sample.rows.get(position, [[-1] * TOPK]) for position in range(len(sample.ids))]
        assert out.tobytes() == np.array(rows, np.int16).tobytes()

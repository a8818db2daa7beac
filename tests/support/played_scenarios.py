"""Plays the scenarios of agents against a session, in any order of commits, with failures and kills."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
from msgspec import structs

from headpond.recording import Prepared, Sealed, Session
from headpond.recording.arrivals import Claim
from headpond.store.columns import read_columns
from headpond.store.experts import Experts
from headpond.store.files import FileStore
from headpond.turn import RouteFormat, Routes, TurnMetadata
from support.agent_scenarios import LAYERS, TOPK, Message, Sent, completion_tokens, row, tokens
from support.conversations import started
from support.plain_samples import PlainSample
from support.turns import turn_of_ids

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
) -> Sealed:
    session = await started(store, concurrency=CONCURRENCY)
    return await (await Playing(session, list(requests), choices, through).play(killed_after)).seal()


def assert_sealed(store: FileStore, sealed: Sealed, expected: list[PlainSample]) -> None:
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
